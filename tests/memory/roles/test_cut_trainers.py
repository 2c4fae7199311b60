"""Trained and frozen roles cut by tp, pp, cp and ep, under AutoTP, FSDP2 and Megatron: bytes worked by hand."""

import time

import pytest

from rlplan.dataflow.choice import EngineChoice, TrainerChoice
from rlplan.dataflow.schedule import Action
from rlplan.memory.roles.engine import EngineOnGpu, Incoming
from rlplan.memory.roles.exported import MegatronSettings, build_megatron_rank
from rlplan.memory.roles.rank import MicroBatchTokens, TrainedRole, list_stages
from rlplan.memory.roles.scorer import FrozenRole, ScorerOnGpu
from rlplan.memory.roles.trainer import TrainerOnGpu
from rlplan.memory.trainers.micro_batch import Place, layer_bytes
from rlplan.memory.trainers.training import cut_autotp_parameters
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.models.catalogue import find_model
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import SettledRollout, SettledTraining
from rlplan.vocabulary import ActionKind, Backend, Loss, MemoryKind, Phase, Placement, Role, Stream

SEVEN = find_model("Qwen/Qwen2.5-7B")
P7 = SEVEN.num_parameters
V3 = find_model("deepseek-ai/DeepSeek-V3")
MIXTURE = find_model("Qwen/Qwen3-30B-A3B")
STATES = (MemoryKind.WEIGHTS, MemoryKind.GRADIENTS, MemoryKind.MASTER_WEIGHTS, MemoryKind.OPTIMIZER)
ONE = MicroBatchTokens(4096, 3072, accumulates=True, num_micro_batches=16)
APART: dict[str, int | bool] = {"sequence_parallel": False}
ALL = MicroBatchTokens(4096, 4096, accumulates=True, num_micro_batches=16)


def action(kind: ActionKind) -> Action:
    return Action(kind.value, kind, Role.POLICY, Phase.TRAIN, "training", Stream.TRAINING, ())


TRAIN, STEP, SCORE = map(action, (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.OPTIMIZER_STEP, ActionKind.SCORE))
OFFLOAD = action(ActionKind.OFFLOAD_ROLE)


def choice(stage: int = 1, **axes: int) -> TrainerChoice:
    return TrainerChoice(stage, True, False, False, 1, **axes)


def trainer(
    overheads: GpuOverheads,
    trainer_choice: TrainerChoice,
    ranks: int,
    backend: Backend = "megatron",
    model=SEVEN,  # type: ignore[no-untyped-def]
    micro_batch: MicroBatchTokens = ONE,
    lora: LoraSpec | None = None,
    overrides: dict[str, int | bool] | None = None,
) -> TrainerOnGpu:
    training = SettledTraining.model_validate({"logits": "plain", "lora": lora, **(overrides or {})})
    return TrainerOnGpu(
        TrainedRole(
            Role.POLICY, model, training, trainer_choice, micro_batch, ranks, overheads, 1 << 29, backend=backend
        )
    )


def states(forecast: TrainerOnGpu) -> dict[MemoryKind, int]:
    sizes = forecast.predict_resident(STEP, "steady")
    return {kind: sizes.get(kind, 0) for kind in STATES}


def peak(forecast: TrainerOnGpu) -> int:
    return sum(forecast.predict_peak(TRAIN, "steady").values())


def test_megatron_holds_six_bytes_of_its_share_and_twelve_over_the_copies(overheads: GpuOverheads) -> None:
    sizes = states(trainer(overheads, choice(tp=2), 8))
    share = (P7 - 57 * 3584) // 2 + 57 * 3584  # norms are whole
    assert sizes == {
        MemoryKind.WEIGHTS: 2 * share,
        MemoryKind.GRADIENTS: 4 * share,
        MemoryKind.MASTER_WEIGHTS: 4 * share // 4,
        MemoryKind.OPTIMIZER: 8 * share // 4,
    }


def test_without_the_distributed_optimizer_it_is_eighteen(overheads: GpuOverheads) -> None:
    assert sum(states(trainer(overheads, choice(0), 8)).values()) == 18 * P7


def test_seventy_billion_over_eight_by_four(overheads: GpuOverheads) -> None:
    model = find_model("meta-llama/Llama-3.1-70B")
    sizes = sum(states(trainer(overheads, choice(tp=8, pp=4), 64, model=model)).values())
    layer = 2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672  # attention, MLP
    table = 129_024 * 8192 // 8  # 128,256 words, padded to a multiple of 128 * 8
    share = 20 * (layer // 8 + 2 * 8192) + table + 8192  # the last stage: 20 of 80 layers, the head, the last norm
    assert sizes == share * (6 + 12 // 2)


def test_a_stage_of_deepseek_v3_is_its_experts_over_ep_and_its_attention_whole(overheads: GpuOverheads) -> None:
    """NeMo-RL's layout of DeepSeek-V3: tp 1, cp 1, ep 16, pp 16 on 512 GPUs."""
    experts = 4 * 256 * 3 * 7168 * 2048 // 16
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    dense = 4 * (attention + 3 * 7168 * 2048 + 256 * 7168 + 2 * 7168)  # shared expert, router, norms
    rank = build_megatron_rank(V3, Role.POLICY, None, MegatronSettings(512, pp=16, ep=16), stage=2)
    assert (rank.experts, rank.dense, rank.state_ranks, rank.expert_state_ranks) == (experts, dense, 32, 2)
    sizes = states(trainer(overheads, choice(pp=16, ep=16), 512, model=V3))
    assert sum(sizes.values()) == 6 * (experts + dense) + 12 * (experts // 2 + dense // 32)


def test_the_published_deepseek_v3_on_96_gpus_is_met() -> None:
    """verl's smallest DeepSeek-V3 run (verl-min-dsv3-h20): tp 8, pp 12, ep 8, optimizer on the host: 66 GB a GPU.

    Its tokens are those of the script that the table of results names (run_deepseek_v3_671b_megatron.sh): 10,240 a
    micro-batch, recomputed in full. Context and communicators are an H100's.
    """
    offloaded = TrainerChoice(1, True, True, False, 1, tp=8, pp=12, ep=8)
    tokens = MicroBatchTokens(10_240, 10_240, accumulates=True)
    forecast = trainer(get_gpu("h100-sxm", where="test").overheads, offloaded, 96, model=V3, micro_batch=tokens)
    sizes = sum(forecast.predict_resident(STEP, "steady").values())
    assert sizes < 66e9
    assert peak(forecast) == pytest.approx(66e9, rel=0.15)
    assert MemoryKind.OPTIMIZER not in forecast.predict_resident(STEP, "steady")
    assert forecast.predict_host(STEP, "steady")[MemoryKind.OPTIMIZER] > 0


def test_experts_are_whole_over_ep_or_cut_over_tp() -> None:
    by_ep = build_megatron_rank(MIXTURE, Role.POLICY, None, MegatronSettings(8, tp=2, ep=4), stage=0)
    by_tp = build_megatron_rank(MIXTURE, Role.POLICY, None, MegatronSettings(8, tp=2), stage=0)
    routed = 48 * 128 * 3 * 2048 * 768
    assert (by_ep.experts, by_tp.experts) == (routed // 4, routed // 2)
    assert (by_ep.state_ranks, by_ep.expert_state_ranks) == (4, 2)
    assert (by_tp.state_ranks, by_tp.expert_state_ranks) == (4, 4)
    assert by_ep.dense == by_tp.dense


def test_the_stages_add_up_to_the_model() -> None:
    settings = MegatronSettings(8, pp=4)
    ranks = [build_megatron_rank(SEVEN, Role.POLICY, None, settings, stage) for stage in range(4)]
    assert sum(rank.dense for rank in ranks) == P7


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages(overheads: GpuOverheads) -> None:
    def activations(num: int | None) -> int:
        micro_batch = MicroBatchTokens(4096, 3072, accumulates=True, num_micro_batches=num)
        return (
            trainer(overheads, choice(pp=4), 8, micro_batch=micro_batch)
            .ranks[0]
            .snapshots["loss"][MemoryKind.ACTIVATIONS]
        )

    kept = 7 * 2 * 3584 * 4096  # seven layers' inputs
    assert activations(1) == kept
    assert activations(2) == 2 * kept
    assert activations(16) == activations(None) == 4 * kept
    assert [stage.has_head for stage in list_stages(SEVEN, 4, 16)] == [False, True]


def test_the_last_stage_has_the_logits(overheads: GpuOverheads) -> None:
    forecast = trainer(overheads, choice(pp=4), 8, micro_batch=MicroBatchTokens(4096, 4096, True, 16))
    assert MemoryKind.LOGITS not in forecast.ranks[0].snapshots["loss"]
    assert forecast.ranks[-1].snapshots["loss"][MemoryKind.LOGITS] == 4096 * SEVEN.vocab_size * 12
    assert peak(forecast) == max(sum(rank.predict_peak(TRAIN, "steady").values()) for rank in forecast.ranks)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_context_parallel_ranks_share_states_and_pass_keys_on(overheads: GpuOverheads, backend: Backend) -> None:
    stage = 3 if backend == "fsdp2" else 1
    whole, cut = (trainer(overheads, choice(stage, cp=cp), 8, backend) for cp in (1, 2))
    assert states(whole) == states(cut)
    ring = 2 * 2 * 2 * SEVEN.num_kv_heads * SEVEN.head_dim * 4096
    more = [
        cut.ranks[0].snapshots[name][MemoryKind.ACTIVATIONS] - whole.ranks[0].snapshots[name][MemoryKind.ACTIVATIONS]
        for name in (Place.MLP, Place.LOSS)
    ]
    assert more == [ring, 0]


def test_sequence_parallel_ranks_share_what_is_kept(overheads: GpuOverheads) -> None:
    whole = trainer(overheads, choice(), 8, micro_batch=ALL)
    shared = trainer(overheads, choice(tp=4), 8, micro_batch=ALL)
    apart = trainer(overheads, choice(tp=4), 8, micro_batch=ALL, overrides=APART)
    kept = [forecast.ranks[0].snapshots["loss"][MemoryKind.ACTIVATIONS] for forecast in (whole, shared, apart)]
    rotary = 4096 * 2 * 2 * 128
    assert kept[0] == kept[2] == 4096 * (28 * 2 * 3584 + 2 * 2 * 3584 + 4) + rotary  # inputs of layers, the last norm
    assert (kept[0] - rotary) // 4 == kept[1] - rotary


def test_the_head_gathers_into_a_buffer_that_stays_while_the_role_is_offloaded(overheads: GpuOverheads) -> None:
    shared = trainer(overheads, choice(tp=4), 8, micro_batch=ALL)
    apart = trainer(overheads, choice(tp=4), 8, micro_batch=ALL, overrides=APART)
    for run_phase, rows in (("start", 0), ("steady", 4096)):
        with_rows, without = shared.predict_resident(OFFLOAD, run_phase), apart.predict_resident(OFFLOAD, run_phase)
        assert with_rows[MemoryKind.COMM_BUFFERS] - without[MemoryKind.COMM_BUFFERS] == rows * 2 * 3584


def test_a_token_in_a_layer_of_experts_is_what_was_worked_by_hand(overheads: GpuOverheads) -> None:
    """Qwen3-30B-A3B: h 2048, q 4096, k 512, 8 of 128 experts 768 wide, in 16 bits under fused kernels.

    tp 4: attention's part 2 * (2 * 1024 + 2 * 128) + 4 * 8, its normed heads 2 * (1024 + 128) + 4 * (8 + 1); the norms'
    inputs and outputs 2 * (2 * 2 * 2048 + 4) and the router's scores 4 * 128, of which a rank has a quarter under
    sequence parallelism. Experts that are whole get a quarter of the rows, 8 * (3 * 2 * 768 + 2 * 2 * 2048 + 40) / 4.
    """
    attention = 4608 + 32 + 2304 + 36
    between, experts = 2 * (4 * 2048 + 4) + 512, 8 * (6 * 192 + (8192 + 40) // 4)
    for axes, expected in (
        ({"tp": 4, "ep": 2}, attention + between // 4 + experts),
        ({"tp": 4}, attention + between // 4 + 8 * (6 * 192 + 8192 + 40)),
        ({"ep": 8}, 4 * attention + between + 4 * experts),
    ):
        forecast = trainer(overheads, choice(**axes), 8, model=MIXTURE)
        assert layer_bytes(forecast.ranks[0].shape) == 4096 * expected, axes
    assert attention + between // 4 + experts == 36_886


def test_fsdp2_shards_fp32_weights_and_moments_and_gathers_two_layers_and_the_root(overheads: GpuOverheads) -> None:
    forecast = trainer(overheads, choice(3), 8, "fsdp2")
    assert states(forecast) == {
        MemoryKind.WEIGHTS: 4 * P7 // 8,
        MemoryKind.GRADIENTS: 0,
        MemoryKind.MASTER_WEIGHTS: 0,
        MemoryKind.OPTIMIZER: 8 * P7 // 8,
    }
    root = 2 * SEVEN.vocab_size * 3584 + 3584
    layer = (P7 - root) // 28
    assert forecast.ranks[0].snapshots["loss"][MemoryKind.COMM_BUFFERS] == 2 * (root + layer)
    scored, sizes = forecast.predict_peak(SCORE, "steady"), forecast.predict_resident(STEP, "steady")
    assert scored[MemoryKind.COMM_BUFFERS] - sizes[MemoryKind.COMM_BUFFERS] == 2 * (root + 2 * layer)


def test_groups_of_fsdp2_ranks_have_a_copy_of_the_states_each(overheads: GpuOverheads) -> None:
    forecast = trainer(overheads, choice(3), 8, "fsdp2", overrides={"fsdp_size": 2})
    assert states(forecast) == states(trainer(overheads, choice(3), 2, "fsdp2"))
    assert states(forecast)[MemoryKind.OPTIMIZER] == pytest.approx(4 * P7, rel=1e-3)  # 8 bytes over 2 of the 8 ranks


def test_fsdp2_on_the_host_leaves_what_is_gathered(overheads: GpuOverheads) -> None:
    forecast = trainer(overheads, TrainerChoice(3, True, True, True, 1), 8, "fsdp2")
    assert not any(states(forecast).values())
    assert forecast.predict_host(STEP, "steady")[MemoryKind.OPTIMIZER] == 8 * P7 // 8
    assert peak(forecast) < peak(trainer(overheads, choice(3), 8, "fsdp2"))


def test_autotp_cuts_layers_but_neither_embedding_nor_head(overheads: GpuOverheads) -> None:
    table, norms = SEVEN.vocab_size * 3584, 57 * 3584
    share = sum(tensor.numel for tensor in cut_autotp_parameters(SEVEN, 2))
    assert share == 2 * table + norms + (P7 - 2 * table - norms) // 2
    sizes = states(trainer(overheads, choice(2, tp=2), 8, "deepspeed"))
    assert sum(sizes.values()) == pytest.approx(2 * share + 12 * share / 4, rel=1e-6)


def test_every_rank_of_autotp_has_the_logits_of_all_words(overheads: GpuOverheads) -> None:
    ranks = [trainer(overheads, choice(2, tp=tp), 8, "deepspeed").ranks[0] for tp in (1, 2)]
    first, second = (rank.snapshots["loss"][MemoryKind.LOGITS] for rank in ranks)
    assert first == second
    megatron = trainer(overheads, choice(tp=2), 8).ranks[0].snapshots["loss"][MemoryKind.LOGITS]
    assert megatron == 3072 * SEVEN.vocab_size // 2 * 12


def test_adapters_under_megatron_have_states_of_their_own_alone(overheads: GpuOverheads) -> None:
    sizes = states(trainer(overheads, choice(tp=2), 8, lora=LoraSpec(rank=8)))
    assert sizes[MemoryKind.WEIGHTS] == pytest.approx(P7, rel=0.01)
    assert sizes[MemoryKind.GRADIENTS] < 0.01 * P7


@pytest.mark.parametrize(("backend", "stage", "share"), [("fsdp2", 3, 8), ("megatron", 1, 4)])
def test_frozen_models_follow_the_policy(overheads: GpuOverheads, backend: Backend, stage: int, share: int) -> None:
    policy_choice = choice(stage, tp=4)
    scorer = ScorerOnGpu(
        FrozenRole(
            Role.REFERENCE,
            SEVEN,
            2,
            Loss.PLAIN,
            ONE,
            8,
            overheads,
            is_sharded=False,
            backend=backend,
            cut=policy_choice,
        )
    )
    assert scorer.predict_resident(SCORE, "steady")[MemoryKind.WEIGHTS] == pytest.approx(2 * P7 / share, rel=0.001)
    reward = ScorerOnGpu(
        FrozenRole(
            Role.REWARD, SEVEN, 2, Loss.PLAIN, ONE, 8, overheads, is_sharded=False, backend=backend, cut=policy_choice
        )
    )
    assert sum(reward.predict_peak(SCORE, "steady").values()) < sum(scorer.predict_peak(SCORE, "steady").values())


def test_an_engine_s_whole_experts_take_what_their_slices_take(overheads: GpuOverheads) -> None:
    def engine(**options: object) -> EngineOnGpu:
        engine_choice = EngineChoice(8, 0, **options)  # type: ignore[arg-type]
        return EngineOnGpu(
            MIXTURE, SettledRollout(), engine_choice, Placement.DISAGGREGATED, overheads, Incoming(1 << 29)
        )

    cut, whole = engine(max_num_seqs=16), engine(max_num_seqs=16, has_expert_parallel=True)
    assert whole.weight_bytes == cut.weight_bytes
    assert whole.activation_bytes > cut.activation_bytes  # rows of the experts' whole width
    assert engine(quantization="fp8").weight_bytes < 0.6 * cut.weight_bytes
    assert engine().asleep[MemoryKind.CUDA_GRAPHS] > cut.asleep[MemoryKind.CUDA_GRAPHS]


def test_a_choice_of_a_very_large_model_takes_milliseconds(overheads: GpuOverheads) -> None:
    def seconds(ranks: int) -> float:
        start = time.process_time()
        peak(trainer(overheads, choice(tp=4, pp=16, ep=8, cp=2), ranks, model=V3))
        return time.process_time() - start

    assert min(seconds(128 * copies) for copies in range(1, 9)) < 5e-3


def test_outside_of_training_an_exported_role_that_is_offloaded_has_its_weights_alone(overheads: GpuOverheads) -> None:
    """verl, NeMo-RL and slime drop gradients and move states before they hand weights over."""
    trainer_choice = choice(tp=8, pp=12, ep=8)

    def rank(**options: bool) -> TrainerOnGpu:
        training = SettledTraining(logits="plain")
        role = TrainedRole(
            Role.POLICY, V3, training, trainer_choice, ONE, 96, overheads, 512 << 20, backend="megatron", **options
        )
        return TrainerOnGpu(role)

    stays, leaves = rank(), rank(offloads_states=True)
    sync, offload = action(ActionKind.SYNC_WEIGHTS), action(ActionKind.OFFLOAD_ROLE)
    weights = leaves.predict_resident(STEP, "steady")[MemoryKind.WEIGHTS]
    cut = 3 * 2048 * 7168 * 257 + 1536 * 24576 + 512 * 32768 + 16384 * 7168  # 256 experts and a shared one, projections
    whole = 7168 * (1536 + 576 + 256) + 2 * 7168 + 1536 + 512  # latents, router, norms
    head = 130048 // 8 * 7168 + 7168  # the vocabulary padded to 128 x 8, and the last norm
    assert weights == 2 * (6 * (cut // 8 + whole) + head)  # six layers on the last stage, five on the others
    assert states(stays)[MemoryKind.GRADIENTS] == 2 * weights  # fp32
    assert [states(leaves)[kind] for kind in STATES] == [weights, 0, 0, 0]
    assert peak(leaves) == peak(stays)  # training itself has everything
    table = 2 * 129280 * 7168
    sizes = leaves.predict_peak(sync, "steady")
    assert sizes[MemoryKind.SYNC_STAGING] == table
    assert sizes[MemoryKind.COMM_BUFFERS] == leaves.predict_resident(STEP, "steady")[MemoryKind.COMM_BUFFERS] + table
    assert MemoryKind.GRADIENTS not in leaves.predict_host(offload, "steady")
    first = stays.ranks[0].fixed.after_step.device[MemoryKind.GRADIENTS]
    assert leaves.moved_bytes == stays.moved_bytes - first  # what is dropped is not copied
