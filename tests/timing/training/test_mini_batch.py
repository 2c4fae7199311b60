"""Training: hand-worked passes, ZeRO's traffic, pipelines, offload, and what never gets slower or faster."""

from dataclasses import replace
from math import hypot

import hypothesis
import pytest
from hypothesis import strategies as st

from rlplan.accuracy.named_models import model_by_name
from rlplan.dataflow.choice import TrainerChoice
from rlplan.memory.trainers.shape import Recompute
from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.spec.parts.training import KernelsSpec, LoraSpec
from rlplan.spec.resolved import SettledTraining
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.training import kernels, passes, shards
from rlplan.timing.training.elementwise import cast_bytes, layers_bytes, loss_bytes
from rlplan.timing.training.flops import Lengths, attention_flops, head_flops, linear_flops
from rlplan.timing.training.mini_batch import MiniBatchShape, micro_batches, score_cost, train_cost
from rlplan.timing.training.optimizer import num_stepped, optimizer_cost, step_bytes_per_parameter
from rlplan.timing.training.passes import stage_costs
from rlplan.timing.training.settings import FORWARD, MicroBatch, StagePart, TrainSetting, training_times
from rlplan.timing.training.shards import stage_transfer_cost
from rlplan.vocabulary import Dtype, Role

MODEL = model_by_name("Qwen/Qwen2.5-7B")
MIXTURE = model_by_name("Qwen/Qwen3-30B-A3B")
PLAIN = TrainerChoice(3, True, False, False, 4)
EVEN = MiniBatchShape(512, 2048, 2048**2, 2048, 2048)
RAGGED = MiniBatchShape(512, 2048, 2 * 2048**2, 8192, 2048)


def cluster(num_gpus: int, name: str = "dgx-h100") -> Cluster:
    node = get_node(name, where="test")
    return Cluster(get_gpu(name, where="test"), num_gpus, node.num_gpus, node)


def change_training(base: TrainSetting, **keys: object) -> TrainSetting:
    """The same with other keys of `training`, or of its kernels."""
    kernel_keys = {key: keys.pop(key) for key in list(keys) if key in KernelsSpec.model_fields}
    if kernel_keys:
        keys["kernels"] = base.training.kernels.model_copy(update=kernel_keys)
    return replace(base, training=base.training.model_copy(update=keys))


def setting(num_ranks: int = 8, choice: TrainerChoice = PLAIN, **changes: object) -> TrainSetting:
    loss = {"fsdp2": "uncast", "megatron": "in_place"}.get(str(changes.get("backend")), "by_rows")
    training = SettledTraining.model_validate({"logits": loss})
    fields = {"model": MODEL, "role": Role.POLICY, "training": training, "backend": "deepspeed"} | changes
    return TrainSetting(choice=choice, num_ranks=num_ranks, **fields)  # type: ignore[arg-type]


def seconds(
    num_ranks: int = 8, choice: TrainerChoice = PLAIN, shape: MiniBatchShape = EVEN, **changes: object
) -> float:
    return train_cost(setting(num_ranks, choice, **changes), shape, cluster(num_ranks)).seconds


def test_the_matmuls_of_a_pass_are_its_flops_over_the_rate_that_is_reached():
    single = setting(1)
    batch = MicroBatch(4, Lengths(2048, 2048**2), 4 * 2048)
    cost = passes.matmul_cost(single, batch, FORWARD, cluster(1))
    tokens, rate = 4 * 2048, 989.4e12 * cluster(1).efficiencies.matmul.value
    matmuls = linear_flops(MODEL) * tokens / (rate * passes._matmul_share(single, tokens))
    scores = 4 * attention_flops(MODEL, batch.lengths) / (rate * 0.5)
    assert cost.seconds == pytest.approx(matmuls + head_flops(MODEL) * tokens / rate + scores)
    assert 0.9 < passes._matmul_share(single, tokens) < 1


def test_recomputation_is_a_third_more_matmuls_and_frozen_weights_a_third_less():
    full, none = training_times(Recompute.FULL), training_times(Recompute.NONE)
    assert (full.matmuls, none.matmuls, full.attention, none.attention) == (4, 3, 4.5, 3.5)
    assert training_times(Recompute.NONE, is_frozen=True).matmuls == 2
    assert seconds(choice=replace(PLAIN, gradient_checkpointing=False)) < 0.8 * seconds()


def test_a_pass_without_gradients_is_a_quarter_of_one_with_recomputation():
    whole = train_cost(setting(), EVEN, cluster(8)).parts[Resource.COMPUTE]
    assert score_cost(setting(), EVEN, cluster(8)).parts[Resource.COMPUTE] == pytest.approx(whole / 4, rel=0.05)


def test_a_value_has_no_vocabulary_to_pay_for():
    value = score_cost(setting(role=Role.VALUE), EVEN, cluster(8)).seconds
    assert value < 0.95 * score_cost(setting(), EVEN, cluster(8)).seconds


def test_stage_three_gathers_twice_and_reduces_once_a_pass():
    host = cluster(8)
    rate = 450e9 * host.efficiencies.device_link.value
    expected = 3 * 2 * MODEL.num_parameters * 7 / 8 / rate
    assert shards.pass_traffic(setting(), host, is_training=True).parts[Resource.DEVICE_LINK] == pytest.approx(expected)
    forward = shards.pass_traffic(setting(), host, is_training=False).parts[Resource.DEVICE_LINK]
    assert forward == pytest.approx(expected / 3)


@pytest.mark.parametrize(("stage", "a_pass", "a_step"), [(0, 0, 2), (1, 0, 2), (2, 1, 1), (3, 3, 0)])
def test_each_stage_of_zero_moves_its_share(stage: int, a_pass: int, a_step: int):
    host, base = cluster(8), setting(choice=replace(PLAIN, zero_stage=stage))
    unit = 2 * MODEL.num_parameters * 7 / 8 / (450e9 * host.efficiencies.device_link.value)
    passed = shards.pass_traffic(base, host, is_training=True).parts.get(Resource.DEVICE_LINK, 0)
    stepped = shards.step_traffic(base, host).parts.get(Resource.DEVICE_LINK, 0)
    assert (passed, stepped) == pytest.approx((a_pass * unit, a_step * unit))


def test_adapters_reduce_their_own_gradients_alone():
    lora = SettledTraining(lora=LoraSpec(rank=16))
    stage = replace(PLAIN, zero_stage=2)
    small = shards.pass_traffic(setting(choice=stage, training=lora), cluster(8), is_training=True).seconds
    assert small < 0.02 * shards.pass_traffic(setting(choice=stage), cluster(8), is_training=True).seconds
    assert (
        optimizer_cost(setting(training=lora), cluster(8)).seconds
        < 0.02 * optimizer_cost(setting(), cluster(8)).seconds
    )


def test_adapters_cost_what_they_read_and_write_and_a_4_bit_base_what_it_takes_to_unfold_it():
    host, batch = cluster(1), MicroBatch(4, Lengths(1024, 1024**2), 4096)
    times = training_times(Recompute.NONE, is_frozen=True)

    def extra(**lora: object) -> Cost:
        return passes.adapter_cost(setting(1, training=SettledTraining(lora=LoraSpec(**lora))), batch, times, host)  # type: ignore[arg-type]

    rate = host.memory_bytes_per_s * host.efficiencies.memory.value
    # q_proj of 28 layers, 3584 by 3584: 2 bytes * (in + 2 r + 6 out), 4096 tokens, forward and twice that backward
    moved = 28 * 2 * (3584 + 2 * 16 + 6 * 3584) * 4096 * 3
    thin = extra(rank=16, target_modules=("q_proj",))
    assert thin.parts[Resource.MEMORY] == pytest.approx(moved / rate)
    assert thin.parts[Resource.COMPUTE] < 0.2 * thin.parts[Resource.MEMORY]
    # 6.525e9 weights of the layers: 0.5 bytes read (scales left out) and 2 written, before either product
    unfolded = extra(rank=16, base_dtype="nf4").seconds - extra(rank=16).seconds
    assert unfolded == pytest.approx(2 * 2.5 * 6.525e9 / rate, rel=2e-3)
    assert extra(rank=64).seconds > extra(rank=16).seconds > thin.seconds


def test_a_pipeline_waits_for_stages_less_one_passes():
    deep = TrainerChoice(1, True, False, False, 1, pp=4)
    cost = train_cost(setting(8, deep, backend="megatron"), EVEN, cluster(8))
    num = micro_batches(setting(8, deep), EVEN)[0]
    assert num == 256
    waits = cost.parts[Resource.IDLE]
    assert waits < (cost.seconds - waits) * 3 / 256  # the stages that it waits for have no head
    inner = stage_costs(
        setting(8, deep, backend="megatron"),
        micro_batches(setting(8, deep), EVEN)[1],
        training_times(Recompute.FULL),
        cluster(8),
        (StagePart(7, False),),
    )[1]
    assert waits == pytest.approx(3 * inner.seconds, rel=0.02)


def test_a_pipeline_is_as_slow_as_its_last_stage_which_has_the_head():
    """The last of sixteen stages of three layers has the head: 2 h V per token, forward and twice that backward."""
    deep = setting(64, TrainerChoice(1, True, False, False, 1, pp=16), model=MIXTURE, backend="megatron")
    deep = change_training(deep, has_cuda_graphs=True)
    host, times = cluster(64), training_times(deep.recompute)
    num, batch = micro_batches(deep, EVEN)
    inner, last = stage_costs(deep, batch, times, host, [StagePart(3, False), StagePart(3, True)])[1:]
    head = 3 * 2 * 2048 * 151936 * 2048 / (989.4e12 * host.efficiencies.matmul.value)
    assert last.parts[Resource.COMPUTE] - inner.parts[Resource.COMPUTE] == pytest.approx(head)
    assert last.seconds > 1.5 * inner.seconds  # experts of 256 rows run at four sevenths of the rate
    handed = 2 * stage_transfer_cost(deep, batch, host).seconds
    expected = (num - 1) * (last.seconds + handed) + 15 * (inner.seconds + handed) + last.seconds + handed
    stepped = shards.step_traffic(deep, host)
    assert train_cost(deep, EVEN, host).seconds == pytest.approx(expected, abs=1.001 * stepped.seconds)
    interleaved = change_training(deep, virtual_stages=2)
    saved = 15 * inner.seconds / 2 + (num * handed)
    assert train_cost(deep, EVEN, host).seconds - train_cost(interleaved, EVEN, host).seconds == pytest.approx(
        saved, rel=0.05
    )


def test_padding_costs_what_packing_saves():
    packed = replace(RAGGED, tokens_per_pass=16384)
    assert seconds(shape=packed) < 0.8 * seconds(shape=RAGGED)


def test_an_optimizer_reads_and_writes_its_states_once():
    base = setting()
    moved = 38 * MODEL.num_parameters / 8
    assert step_bytes_per_parameter(base) == 38
    assert num_stepped(base) == MODEL.num_parameters / 8
    assert optimizer_cost(base, cluster(8)).seconds == pytest.approx(moved / (3.35e12 * 0.8), rel=0.01)


def test_megatron_s_step_goes_over_the_whole_buffer_of_gradients_beside_a_rank_s_share():
    """Bytes in 16 bits: searched, divided, set to zero 4 * 2 per parameter; of the share 2 + 4 to have them in fp32, 4
    for the norm, 8 to scale, 4 to step, 24 of states, 2 of the new weight. In fp32 4 * 4, and no copy."""
    base = setting(backend="megatron")
    assert step_bytes_per_parameter(base) == 6 + 4 + 8 + 4 + 24 + 4 + 2
    moved = 52 * MODEL.num_parameters / 8 + 8 * MODEL.num_parameters
    assert optimizer_cost(base, cluster(8)).seconds == pytest.approx(moved / (3.35e12 * 0.8), rel=0.01)
    wide = change_training(base, reduce_dtype=Dtype.FLOAT32)
    assert step_bytes_per_parameter(wide) == 46
    moved = 46 * MODEL.num_parameters / 8 + 16 * MODEL.num_parameters
    assert optimizer_cost(wide, cluster(8)).seconds == pytest.approx(moved / (3.35e12 * 0.8), rel=0.01)


@pytest.mark.parametrize(
    ("kernels", "whole_s"),
    [
        ({}, 13e-3),
        ({"fuses_router": True}, 9e-3),
        ({"has_cuda_graphs": "router"}, 3.6e-3),
        ({"has_cuda_graphs": "attention", "fuses_router": True}, 5.4e-3),
    ],
)
def test_a_layer_of_experts_waits_for_its_host_by_the_passes_that_launch_it(kernels, whole_s):
    """Seconds forward and backward, a third of it forward alone; with recomputation a third more."""
    small = MicroBatch(1, Lengths(8, 64), 8)
    base = change_training(setting(8, model=MIXTURE, backend="megatron"), **kernels)
    never = change_training(base, has_cuda_graphs=True)
    for recompute, thirds in ((None, 1), (Recompute.NONE, 3), (Recompute.FULL, 4)):
        times = FORWARD if recompute is None else training_times(recompute)
        cost, busy = (passes.pass_cost(each, small, times, cluster(8)).seconds for each in (base, never))
        assert cost == pytest.approx(hypot(busy, 48 * whole_s / 3 * thirds))


@pytest.mark.parametrize(("waits", "more_s"), [("layers", 28 * 6.5e-3), ("tokens", 28 * 6.5e-3 + 1000 * 18e-6)])
def test_a_host_that_waits_for_its_gpu_adds_launches_and_values_read_back(waits, more_s):
    """Qwen2.5-7B has 28 layers, each launched in 6.5 ms forward and backward; 1,000 tokens at 18 us."""
    base, batch, times = (
        setting(8, backend="fsdp2"),
        MicroBatch(1, Lengths(1000, 1e6), 1000),
        training_times(Recompute.NONE),
    )
    cost, usual = (
        passes.pass_cost(each, batch, times, cluster(8)).seconds for each in (replace(base, host_waits=waits), base)
    )
    assert cost - usual == pytest.approx(more_s)


def test_a_dense_layer_takes_as_long_as_its_host_needs_to_launch_it():
    """Qwen3-8B on 4 H100, tensor parallel, packs of 2,048 tokens: 232 ms a micro-batch were measured
    (Megatron-Bridge, examples/model_verification_cards/qwen3-8b/card.yaml)."""
    qwen = model_by_name("Qwen/Qwen3-8B")
    base = setting(4, replace(PLAIN, tp=4), model=qwen, backend="megatron")
    times, small = training_times(Recompute.NONE), MicroBatch(1, Lengths(2048, 2048**2), 2048)
    assert passes.pass_cost(base, small, times, cluster(4)).seconds == pytest.approx(0.232, rel=0.02)
    captured = change_training(base, has_cuda_graphs=True)
    assert passes.pass_cost(captured, small, times, cluster(4)).seconds < 0.1


def test_only_another_micro_batch_hides_the_way_to_experts():
    base = setting(16, replace(PLAIN, ep=16), model=MIXTURE, backend="megatron")
    ours = change_training(base, overlaps_experts=True, expert_dispatcher="hybridep", has_cuda_graphs=True)
    batch, times = MicroBatch(1, Lengths(4096, 4096**2), 4096), training_times(Recompute.NONE)
    beside, alone = (
        passes.pass_cost(replace(ours, has_other_passes=others), batch, times, cluster(16)).seconds
        for others in (True, False)
    )
    plain = passes.pass_cost(change_training(ours, overlaps_experts=False), batch, times, cluster(16)).seconds
    assert alone == pytest.approx(plain)
    assert beside < alone


def test_tokens_that_are_predicted_ahead_take_layers_and_the_head_once_more():
    batch, host = MicroBatch(1, Lengths(2048, 2048**2), 2048), cluster(8)
    base, times = setting(8, backend="megatron"), training_times(Recompute.NONE)
    ahead = times.add_predicted_ahead(2, 3 / MODEL.num_layers)
    plain, more = (passes.matmul_cost(base, batch, each, host).seconds for each in (times, ahead))
    head = 3 * head_flops(MODEL) * 2048 / kernels.matmul_flops_per_s(host)
    assert more - head * 3 == pytest.approx((plain - head) * (1 + 2 * 3 / MODEL.num_layers))
    assert ahead.num_losses == 3


def test_experts_gradients_are_added_up_in_the_type_in_which_they_are_reduced():
    """Qwen3-30B-A3B: 48 layers of 128 experts; 8 bytes of each of their weights a pass in fp32, 4 in bf16."""
    base = setting(8, model=MIXTURE, backend="megatron")
    batch, times = MicroBatch(1, Lengths(2048, 2048**2), 2048), training_times(Recompute.NONE)
    cases = [change_training(base, reduce_dtype=dtype) for dtype in ("auto", Dtype.BFLOAT16, Dtype.FLOAT32)]
    none, half, whole = (passes.elementwise_cost(each, batch, times, cluster(8)).seconds for each in cases)
    experts = 48 * 128 * 3 * 768 * 2048
    assert half - none == pytest.approx(4 * experts / (3.35e12 * 0.8))
    assert whole - none == pytest.approx(8 * experts / (3.35e12 * 0.8))


def test_fsdp2_reduces_gradients_in_fp32_unless_it_is_told_otherwise():
    """Source: verl 0.9.0, fsdp/transformer_impl.py:375; NeMo-RL 0.3.0, models/dtensor/parallelize.py:466.
    On the wire of 16 GPUs: gathers of 2 + 2 bytes a parameter and a reduction of 4, or of 2."""
    base, hosts = setting(16, backend="fsdp2"), cluster(16)
    halved = change_training(base, reduce_dtype=Dtype.BFLOAT16)
    usual, less = (
        shards.pass_traffic(each, hosts, is_training=True).parts[Resource.NETWORK] for each in (base, halved)
    )
    assert usual / less == pytest.approx((2 + 2 + 4) / (2 + 2 + 2))


def test_an_offloaded_optimizer_shares_the_hosts_memory():
    host, gpu = cluster(8), optimizer_cost(setting(), cluster(8)).seconds
    away = optimizer_cost(setting(choice=replace(PLAIN, offloads_optimizer=True)), host)
    assert away.parts[Resource.HOST] == pytest.approx(
        38 * MODEL.num_parameters / host.node_efficiencies.host_memory_bytes_per_s.value
    )
    assert away.seconds > 10 * gpu
    disk = SettledTraining(offload_device="nvme")
    choice = replace(PLAIN, offloads_optimizer=True)
    assert optimizer_cost(setting(choice=choice, training=disk), host).seconds > away.seconds


def test_eight_bit_states_and_one_moment_move_fewer_bytes():
    plain, small, muon = (
        step_bytes_per_parameter(setting(training=SettledTraining(optimizer=name)))
        for name in ("adamw", "adamw_8bit", "muon")
    )
    assert small < plain
    assert muon == plain - 8


@hypothesis.given(ranks=st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_more_gpus_are_never_slower_at_a_mini_batch(ranks: int):
    assert seconds(2 * ranks) <= seconds(ranks) * 1.001


@hypothesis.given(count=st.integers(64, 4096), stage=st.sampled_from([0, 1, 2, 3]))
def test_more_rollouts_never_take_less_time(count: int, stage: int):
    choice = replace(PLAIN, zero_stage=stage)
    less, more = (seconds(choice=choice, shape=replace(EVEN, num_rollouts=n)) for n in (count, count + 64))
    assert less <= more


@pytest.mark.parametrize("length", [512, 2048, 8192, 32768])
def test_longer_sequences_never_take_less_time(length: int):
    less, more = (MiniBatchShape(512, s, s * s, s, s) for s in (length, 2 * length))
    assert seconds(shape=more) > 1.8 * seconds(shape=less)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 8}, {"cp": 2}, {"ulysses": 4}])
def test_ranks_that_share_a_sequence_pay_for_what_they_exchange(axes: dict[str, int]):
    choice = replace(PLAIN, zero_stage=1, micro_batch=1, **axes)
    alone = train_cost(setting(choice=replace(PLAIN, zero_stage=1, micro_batch=1)), EVEN, cluster(8))
    split = train_cost(setting(choice=choice), EVEN, cluster(8))
    assert split.parts[Resource.DEVICE_LINK] > alone.parts[Resource.DEVICE_LINK]
    assert 0.9 < split.parts[Resource.COMPUTE] / alone.parts[Resource.COMPUTE] < 1.4  # thin rows of 2048 / ranks


def test_experts_exchange_their_rows():
    choice = replace(PLAIN, zero_stage=1, micro_batch=1)
    alone = train_cost(setting(choice=choice, model=MIXTURE), EVEN, cluster(8)).parts[Resource.DEVICE_LINK]
    split = train_cost(setting(choice=replace(choice, ep=8), model=MIXTURE), EVEN, cluster(8))
    assert split.parts[Resource.DEVICE_LINK] > alone


def test_thin_passes_reach_less_of_the_peak():
    assert kernels.wave_share(256, 4096) < 0.4 < 0.95 < kernels.wave_share(32768, 4096)
    thin = replace(EVEN, mean_len=128, mean_square_len=128**2, max_len=128)
    few, many = seconds(choice=replace(PLAIN, micro_batch=1), shape=thin), seconds(shape=thin)
    assert few > 1.5 * many


def test_small_passes_wait_for_the_host_to_launch_kernels():
    tiny = model_by_name("Qwen/Qwen2.5-0.5B")
    thin = replace(EVEN, mean_len=64, mean_square_len=64**2, max_len=64)
    fused = SettledTraining(logits="fused")
    cost = train_cost(setting(1, replace(PLAIN, micro_batch=1), model=tiny, training=fused), thin, cluster(1))
    assert cost.bound_by is Resource.LATENCY


def test_logits_by_rows_cost_the_head_once_more_and_every_operators_traffic():
    by_rows, in_place = (
        train_cost(setting(1, training=SettledTraining(logits=logits)), EVEN, cluster(1))
        for logits in ("by_rows", "in_place")
    )
    head = 2 * MODEL.hidden_size * MODEL.vocab_size * 512 * 2048 / kernels.matmul_flops_per_s(cluster(1))
    assert by_rows.parts[Resource.COMPUTE] - in_place.parts[Resource.COMPUTE] == pytest.approx(head)
    rate = cluster(1).memory_bytes_per_s * cluster(1).efficiencies.memory.value
    moved = (46 + 44 - 10 - 8) * MODEL.vocab_size * 512 * 2048 / rate
    assert by_rows.parts[Resource.MEMORY] - in_place.parts[Resource.MEMORY] == pytest.approx(moved)


def test_traffic_hides_behind_computing_but_for_the_first_layer():
    computing, traffic = Cost({Resource.COMPUTE: 10.0}), Cost({Resource.NETWORK: 30.0})
    assert shards.overlap(computing, traffic, 10).seconds == pytest.approx(10 + 20 + 3 + 0.15 * 7)


def test_fused_kernels_move_fewer_bytes():
    assert layers_bytes(MODEL, is_fused=True) < layers_bytes(MODEL, is_fused=False) / 2
    assert cast_bytes(MODEL, is_backward=True) > cast_bytes(MODEL, is_backward=False)
    assert loss_bytes(IN_PLACE, 10, is_backward=True) < loss_bytes(IN_PLACE, 10, is_backward=False)


def test_casts_to_eight_bits_by_hand():
    """28 layers of h 3584, k 512, I 18944: inputs 3 * 3584 + 18944, outputs 2 * 3584 + 2 * 512 + 2 * 18944 + 3584."""
    inputs, outputs = 29696, 49664
    assert cast_bytes(MODEL, is_backward=True) == 28 * (5 * outputs + 3 * inputs)
    assert cast_bytes(MODEL, is_backward=True, transposes_gradients=True) == 28 * (8 * outputs + 3 * inputs)
    # h of two modules was gathered in 8 bits on each of two ranks: 2 bytes each, instead of 3 of shared ones, both ways
    whole = 2 * (2 * 2 - 3) * 2 * 3584
    num_bytes = cast_bytes(MODEL, is_backward=True, tp=2, transposes_gradients=True)
    assert num_bytes == 28 * (8 * outputs + 3 * inputs + whole)
    scaled = 4 * (5 * 3584 + 3584 + 18944)  # input gradient of each linear layer, scaled after its matmul
    by_row = 10 * outputs + 5 * inputs + scaled
    assert cast_bytes(MODEL, is_backward=True, scales_rows=True) == 28 * by_row
    two = cast_bytes(MODEL, is_backward=True, tp=2, scales_rows=True)
    assert two == 28 * (by_row + 15 * 2 * 3584 + 4 * 5 * 3584)


def test_weights_that_each_rank_casts_are_read_and_written_once_a_matmul():
    batch = MicroBatch(1, Lengths(2048, 2048**2), 2048)
    base, args = setting(8), (batch, training_times(Recompute.FULL), cluster(8))
    kinds = (  # Megatron casts none of its own
        replace(change_training(base, matmuls="fp8"), backend="megatron"),
        change_training(base, matmuls="mxfp8", is_compiled=True),
    )
    moved = [passes.elementwise_cost(each, *args) for each in kinds]
    rate = cluster(8).memory_bytes_per_s * cluster(8).efficiencies.memory.value
    weights = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert moved[1].seconds - moved[0].seconds == pytest.approx(3 * 3 * weights / rate)


IN_PLACE = setting().loss


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        (kernels.Attention.FLASH_2, (284, 319), (279, 310)),
        (kernels.Attention.VENDOR, (420, 579), (453, 542)),
    ],
)
def test_attention_of_narrow_heads_is_as_much_slower_as_published(
    kind: kernels.Attention, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """TFLOP/s on H100 of heads of 64 and 128, 4,096 tokens (Shah et al. 2024): once forward, 2.5 times backward."""
    narrow, wide = (1 / forward[at] + 2.5 / backward[at] for at in (0, 1))
    runs = kernels.Kernels(attention=kind)
    rates = [kernels.attention_flops_per_s(cluster(1), runs, 4096, width) for width in (64, 128, 256)]
    assert rates[1] / rates[0] == pytest.approx(narrow / wide, rel=0.01)
    assert rates[1] == rates[2]


def test_attention_of_an_older_kernel_is_slower_and_eight_bit_matmuls_faster():
    host, attention = cluster(1), kernels.Attention
    rates = [
        kernels.attention_flops_per_s(host, kernels.Kernels(attention=kind), 4096)
        for kind in (attention.FLASH_1, attention.FLEX, attention.FLASH_2, attention.VENDOR)
    ]
    assert rates == sorted(rates)
    assert kernels.matmul_flops_per_s(host, has_fp8=True) == pytest.approx(
        2 * kernels.matmul_flops_per_s(host), rel=1e-3
    )


def test_parameters_on_the_host_come_up_for_every_gather():
    """One pass of 28 layers is too thin to hide 15 GB over PCIe."""
    choice = replace(PLAIN, offloads_parameters=True)
    thin = replace(EVEN, num_rollouts=8, mean_len=128, mean_square_len=128**2, max_len=128)
    host = cluster(1)
    alone = train_cost(setting(1, PLAIN), thin, host).seconds
    assert train_cost(setting(1, choice), thin, host).seconds > alone + 0.5


def test_mini_batches_that_are_not_balanced_wait_for_the_largest_sum_of_lengths():
    """512 rollouts on 8 ranks: 64 each, 131,072 tokens with the deviation 2,048 x 8; the largest of 8 is 1.43 above."""
    cost = {even: train_cost(setting(), replace(RAGGED, is_balanced=even), cluster(8)) for even in (True, False)}
    passes = cost[True].seconds - cost[True].parts.get(Resource.IDLE, 0.0)
    assert cost[False].seconds / passes - 1 == pytest.approx(1.43 * 2048 * 8 / 131_072, rel=0.01)
    assert cost[True].seconds < cost[False].seconds
