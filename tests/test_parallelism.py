"""What each kind of parallelism sends, against counts made by hand."""

import pytest

from lablib.calc.memory import training_memory
from lablib.calc.models import ModelConfig, preset
from lablib.calc.parallel import traffic as p
from lablib.calc.params import count_params

#: Two layers, width 8, four heads of which two hold keys: small enough to count by hand.
TINY = ModelConfig(num_layers=2, hidden=8, num_heads=4, num_kv_heads=2, ffn=16, vocab=32)


def test_data_parallelism_sends_gradients_once_and_stage_3_sends_half_more():
    psi = count_params(TINY).total
    assert p.data_traffic(TINY, 4).bytes_sent == 2 * 2 * psi * 3 / 4
    assert p.data_traffic(TINY, 4, stage=3).bytes_sent == 1.5 * p.data_traffic(TINY, 4).bytes_sent
    assert p.data_traffic(TINY, 4, stage=2) == p.data_traffic(TINY, 4)


def test_tensor_parallelism_is_8_b_s_h_per_layer():
    tokens = 2 * 16
    traffic = p.tensor_traffic(TINY, 4, tokens=tokens, micro_batches=2)
    assert traffic.bytes_sent == 2 * 8 * tokens * 8 * 3 / 4 * 2  # layers, factor, tokens, h, (t-1)/t, bytes
    assert traffic.messages == 2 * 4 * 2


def test_sequence_parallelism_sends_what_the_variant_whose_memory_is_counted_sends():
    plain = p.tensor_traffic(TINY, 4, tokens=32)
    keep, shard = (p.tensor_traffic(TINY, 4, tokens=32, sequence_parallel=v) for v in ("keep", "shard"))
    assert keep.bytes_sent == plain.bytes_sent
    assert shard.bytes_sent == 10 / 8 * plain.bytes_sent
    assert (plain.messages, keep.messages, shard.messages) == (2 * 4, 2 * 8, 2 * 10)
    # The memory is that of "shard": every activation of a layer is divided, so that the input is gathered again.
    at_8 = {"micro_batch": 1, "seq": 1024, "implementation": "paper", "attention": "fused"}
    kept = [training_memory("llama-3-8b", tp=8, sequence_parallel=sp, **at_8).activations for sp in (False, True)]
    whole = training_memory("llama-3-8b", **at_8).activations
    assert kept[1] == pytest.approx(whole / 8, rel=0.01)
    assert kept[0] > 1.5 * kept[1]


def test_a_pipeline_stage_sends_one_tensor_each_way():
    traffic = p.pipeline_traffic(TINY, 4, tokens=32, micro_batches=2)
    assert traffic.bytes_sent == 2 * 32 * 8 * 2
    assert traffic.messages == 4
    assert p.pipeline_traffic(TINY, 1, tokens=32).bytes_sent == 0


def test_context_parallelism_sends_keys_values_and_gradients():
    kv_width = 2 * 2  # two key heads of width 2
    keys_and_values = 2 * 32 * kv_width * 2
    expected = 2 * 2 * keys_and_values * 3 / 4 + p.data_traffic(TINY, 4).bytes_sent
    assert p.context_traffic(TINY, 4, tokens=32).bytes_sent == expected


def test_expert_parallelism_sends_tokens_and_the_gradients_of_what_is_replicated():
    moe = ModelConfig(
        family="mixtral", num_layers=2, hidden=8, num_heads=4, ffn=16, vocab=32,
        num_experts=4, experts_per_token=2, expert_ffn=16,
    )  # fmt: skip
    experts = 2 * 4 * 3 * 8 * 16
    replicated = count_params(moe).total - experts
    tokens_out = 4 * 2 * (32 / 4) * 2 * 8 * 2 * 3 / 4  # 4 passes, 2 layers, own tokens, 2 copies, h, bytes
    sent = p.expert_traffic(moe, 4, tokens=32).bytes_sent
    assert sent == pytest.approx(tokens_out + 2 * 2 * replicated * 3 / 4)


@pytest.mark.parametrize("kind", [p.tensor_traffic, p.pipeline_traffic, p.context_traffic])
def test_one_rank_sends_nothing(kind):
    assert kind(TINY, 1, tokens=32).bytes_sent == 0
    assert p.data_traffic(TINY, 1).bytes_sent == 0


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="ranks=8 does not divide num_experts=0 of llama-3-8b"):
        p.expert_traffic(preset("llama-3-8b"), 8, tokens=32)
    with pytest.raises(ValueError, match="num_experts=8"):
        p.expert_traffic(preset("mixtral-8x7b"), 3, tokens=32)
