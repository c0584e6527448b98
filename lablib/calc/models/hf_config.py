"""Reading a Hugging Face `config.json` into a ModelConfig; every complaint names the field. Read `from_hf` first.

A field that fixes a size must be there: a silent default would give a wrong count. Fields that transformers itself
derives may be missing or null, and get what transformers would use: `num_key_value_heads` (as many as query heads,
in the Llama family), `head_dim` (hidden size over heads), `n_inner` (four times the width). Missing biases are none,
and a missing `tie_word_embeddings` is what the family does. JSON is not typed, so a number may come as text, as null,
as 4096.0 or as true; none of these is taken for a size.

An image-and-text Gemma 3 keeps its decoder under `text_config` and leaves out what is the class's default there; the
decoder is what is counted, without the part that sees.

What changes the model in a way that is not counted is refused: cross-attention, experts in every other layer, another
head, and a field that other families have parameters for and this one's class does not read (`hf_families.UNREAD`).
What changes no size is read by `details` where an exporter needs it (rotary positions, the router), and passed over
otherwise: softcaps, the scale of logits, activation functions, dtypes, `quantization_config` (how a checkpoint is
stored; the recipe says how it is trained), and DeepSeek's `num_nextn_predict_layers`, which its published 671B leave
out too.
"""

from __future__ import annotations

from lablib.calc.errors import shown
from lablib.calc.models.config import ModelConfig
from lablib.calc.models.details import read_details
from lablib.calc.models.hf_families import BY_TYPE, GEMMA3_TEXT, TYPE_OF, UNREAD
from lablib.calc.models.hf_fields import Fields, load

#: Heads that are not a language model's, by the end of their class's name.
_OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "RewardModel")


def from_hf(source: object, *, name: str | None = None) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face configuration.

    Args:
        source: The dictionary, or the path of a config.json or of its folder.
        name: What to call the model; by default what the configuration calls itself.

    Raises:
        ValueError: If the architecture is unknown, or a field is missing or strange; it names the field.
    """
    fields = source if isinstance(source, dict) else load(source)
    own_name = fields.get("_name_or_path")
    model_type = _model_type(fields)
    where, defaults = f"config of model_type {model_type}", {}
    if model_type == "gemma3":
        fields, model_type, defaults = _text_part(fields), "gemma3_text", GEMMA3_TEXT
        where += ", text_config"
    family, reader = BY_TYPE[model_type]
    f = Fields(fields, where, defaults)
    f.only("is_encoder_decoder", False, None, why="only decoders are known")
    sizes = reader(f)
    f.refuse_unread(UNREAD)
    if name is None:
        usable = isinstance(own_name, str) and own_name.strip() and own_name.isprintable()
        name = own_name if usable else model_type
    try:
        return ModelConfig(name=name, family=family, **sizes, **read_details(fields, family))
    except ValueError as error:
        raise ValueError(f"{f.where}: {error}") from None


def _model_type(fields: dict) -> str:
    """The model type, or what the class in `architectures` says."""
    architectures = fields.get("architectures")
    if architectures is None:
        architectures = []
    if not isinstance(architectures, list) or not all(isinstance(one, str) for one in architectures):
        raise ValueError(f"architectures is {shown(architectures)} and must be a list of names of classes")
    for one in architectures:
        if one.endswith(_OTHER_HEADS):
            raise ValueError(f"architectures is {shown(architectures)}: only the head of a language model is counted")
    model_type = fields.get("model_type")
    if model_type is None:
        if not architectures:
            raise ValueError("model_type is missing, and architectures too: this is not a model's config.json")
        model_type = TYPE_OF.get(architectures[0], architectures[0])
    if isinstance(model_type, str) and (model_type in BY_TYPE or model_type == "gemma3"):
        return model_type
    message = f"unknown architecture: model_type is {shown(model_type)}; known are {', '.join(BY_TYPE)}"
    inside = fields.get("text_config")
    if isinstance(inside, dict):
        message += f"; its text_config has model_type {shown(inside.get('model_type'))}: give that part alone"
    raise ValueError(message)


def _text_part(fields: dict) -> dict:
    """The decoder of an image-and-text Gemma 3, with the tie that the whole model declares."""
    where = "config of model_type gemma3"
    text = fields.get("text_config")
    if not isinstance(text, dict):
        problem = "is missing" if text is None else f"is {shown(text)}"
        raise ValueError(f"{where}: text_config {problem} and must be an object with the decoder's fields")
    if text.get("model_type", "gemma3_text") != "gemma3_text":
        raise ValueError(f"{where}, text_config: model_type is {shown(text['model_type'])}, not 'gemma3_text'")
    tie = "tie_word_embeddings"
    if tie in fields and text.get(tie, fields[tie]) != fields[tie]:
        raise ValueError(f"{where}: {tie} is {shown(fields[tie])}, and {shown(text[tie])} in text_config")
    return {tie: fields[tie]} | text if tie in fields else text
