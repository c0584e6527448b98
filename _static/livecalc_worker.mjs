// Python beside the page: a worker, so that nothing on the page stands still while it starts.

let answer;

// Both come at once: the interpreter, and lablib.calc and lablib.live as a zip file that Python imports from.
async function start({ pyodide, zip }) {
  const [{ loadPyodide }, bytes] = await Promise.all([
    import(pyodide + "pyodide.mjs"),
    fetch(zip).then((reply) => {
      if (!reply.ok) throw new Error(`${reply.status} for ${zip}`);
      return reply.arrayBuffer();
    }),
  ]);
  const python = await loadPyodide({ indexURL: pyodide });
  python.FS.writeFile("/lablib.zip", new Uint8Array(bytes));
  return python.runPython(`
import sys
sys.path.insert(0, "/lablib.zip")
from lablib.live.explorer import answer_json
lambda module, state, reply: answer_json(module, state, reply=reply)
`);
}

self.onmessage = async ({ data }) => {
  try {
    answer ??= start(data);
    const ask = await answer;
    const reply = data.module ? JSON.parse(ask(data.module, JSON.stringify(data.state), data.reply)) : null;
    self.postMessage({ id: data.id, reply });
  } catch (error) {
    self.postMessage({ id: data.id, error: String(error.message ?? error) });
  }
};
