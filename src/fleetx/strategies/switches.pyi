"""Written by `make types` from the parts in this folder; not by hand."""

from collections.abc import Sequence
from os import PathLike
from typing import Generic, Literal, Self, TypedDict, TypeVar, overload

from . import (
    DGC,
    AdaptiveLocalSGD,
    AdaptiveLocalSGDSettings,
    Amp,
    AmpSettings,
    Auto,
    AutoSettings,
    BF16AllReduce,
    ClipNorm,
    ClipNormSettings,
    Compile,
    CompileSettings,
    DGCSettings,
    FP16AllReduce,
    GradientMerge,
    GradientMergeSettings,
    Lamb,
    LambSettings,
    Lars,
    LarsSettings,
    LocalSGD,
    LocalSGDSettings,
    Muon,
    MuonSettings,
    PowerSGD,
    PowerSGDSettings,
    QuantizedAllReduce,
    QuantizedAllReduceSettings,
    Recompute,
    RecomputeSettings,
    Sharding,
    ShardingSettings,
    SyncBatchNorm,
)

Read = TypeVar("Read")
Write = TypeVar("Write")

class Setting(Generic[Read, Write]):
    @overload
    def __get__(self, instance: None, owner: type[object]) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[object]) -> Read: ...
    def __set__(self, instance: object, value: Write) -> None: ...

class AdaptiveLocalSGDValues(TypedDict):
    """Settings of `adaptive_localsgd` as they read back: all keys."""

    init_k_steps: int
    begin_step: int
    max_k_steps: int
    formula: Literal["paper", "fleet"]
    outer_lr: float
    outer_momentum: float
    outer_nesterov: bool
    average_state: bool
    wire_dtype: Literal["float32", "bfloat16", "float16", "int8", "int4"]
    overlap_steps: int
    across_nodes_every: int
    top_k: int | None
    chunk: int
    value_bits: Literal[2, 4, 8, 32]
    error_decay: float

class AmpValues(TypedDict):
    """Settings of `amp` as they read back: all keys."""

    dtype: Literal["bfloat16", "float16"] | None
    init_loss_scaling: float
    incr_every_n_steps: int
    decr_every_n_nan_or_inf: int
    incr_ratio: float
    decr_ratio: float
    use_dynamic_loss_scaling: bool
    custom_black_list: list[str] | tuple[str, ...]

class AutoValues(TypedDict):
    """Settings of `auto` as they read back: all keys."""

    risk: Literal["exact", "rounding", "lossy", "schedule"]
    trials: int
    memory: int | str | None
    global_batch: int | None
    total_steps: int | None
    plan: str | PathLike[str] | None

class ClipNormValues(TypedDict):
    """Settings of `clip_norm` as they read back: all keys."""

    max_norm: float

class CompileValues(TypedDict):
    """Settings of `compile` as they read back: all keys."""

    scope: Literal["blocks", "model"]
    mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
    dynamic: bool | None

class DGCValues(TypedDict):
    """Settings of `dgc` as they read back: all keys."""

    rampup_begin_step: int
    rampup_step: int
    sparsity: Sequence[float]
    min_numel: int
    clip_norm: float | None
    two_level: bool

class GradientMergeValues(TypedDict):
    """Settings of `gradient_merge` as they read back: all keys."""

    k_steps: int
    avg: bool

class LambValues(TypedDict):
    """Settings of `lamb` as they read back: all keys."""

    lamb_weight_decay: float
    exclude_from_weight_decay: list[str] | tuple[str, ...]
    always_adapt: bool

class LarsValues(TypedDict):
    """Settings of `lars` as they read back: all keys."""

    lars_coeff: float
    lars_weight_decay: float
    epsilon: float
    exclude_from_weight_decay: list[str] | tuple[str, ...]
    carry_norms: bool

class LocalSGDValues(TypedDict):
    """Settings of `localsgd` as they read back: all keys."""

    k_steps: int
    begin_step: int
    outer_lr: float
    outer_momentum: float
    outer_nesterov: bool
    average_state: bool
    wire_dtype: Literal["float32", "bfloat16", "float16", "int8", "int4"]
    overlap_steps: int
    across_nodes_every: int
    top_k: int | None
    chunk: int
    value_bits: Literal[2, 4, 8, 32]
    error_decay: float
    fragments: int

class MuonValues(TypedDict):
    """Settings of `muon` as they read back: all keys."""

    momentum: float
    nesterov: bool
    ns_steps: int
    muon_weight_decay: float
    exclude: list[str] | tuple[str, ...]
    adjust_lr_fn: Literal["original", "match_rms_adamw"]
    ns_coefficients: Sequence[float]
    ns_dtype: Literal["bfloat16", "float32", "float64"]

class PowerSGDValues(TypedDict):
    """Settings of `powersgd` as they read back: all keys."""

    rank: int
    begin_step: int
    min_compression: float
    two_level: bool

class QuantizedAllReduceValues(TypedDict):
    """Settings of `quantized_allreduce` as they read back: all keys."""

    bits: Literal[8, 4]
    block: int
    error_feedback: bool

class RecomputeValues(TypedDict):
    """Settings of `recompute` as they read back: all keys."""

    checkpoints: list[str] | tuple[str, ...]
    budget: int | str | None
    offload: bool

class ShardingValues(TypedDict):
    """Settings of `sharding` as they read back: all keys."""

    stage: int
    merge_sharded: bool
    sharding_degree: int | None

class Keywords(TypedDict, total=False):
    adaptive_localsgd: bool | AdaptiveLocalSGDSettings | AdaptiveLocalSGD
    adaptive_localsgd_configs: AdaptiveLocalSGDSettings
    amp: bool | AmpSettings | Amp
    amp_configs: AmpSettings
    auto: bool | AutoSettings | Auto
    auto_configs: AutoSettings
    bf16_allreduce: bool | BF16AllReduce
    clip_norm: bool | ClipNormSettings | ClipNorm
    clip_norm_configs: ClipNormSettings
    compile: bool | CompileSettings | Compile
    compile_configs: CompileSettings
    dgc: bool | DGCSettings | DGC
    dgc_configs: DGCSettings
    fp16_allreduce: bool | FP16AllReduce
    gradient_merge: bool | GradientMergeSettings | GradientMerge
    gradient_merge_configs: GradientMergeSettings
    lamb: bool | LambSettings | Lamb
    lamb_configs: LambSettings
    lars: bool | LarsSettings | Lars
    lars_configs: LarsSettings
    localsgd: bool | LocalSGDSettings | LocalSGD
    localsgd_configs: LocalSGDSettings
    muon: bool | MuonSettings | Muon
    muon_configs: MuonSettings
    powersgd: bool | PowerSGDSettings | PowerSGD
    powersgd_configs: PowerSGDSettings
    quantized_allreduce: bool | QuantizedAllReduceSettings | QuantizedAllReduce
    quantized_allreduce_configs: QuantizedAllReduceSettings
    recompute: bool | RecomputeSettings | Recompute
    recompute_configs: RecomputeSettings
    sharding: bool | ShardingSettings | Sharding
    sharding_configs: ShardingSettings
    sync_batch_norm: bool | SyncBatchNorm
    fuse_grad_size_in_MB: float
    find_unused_parameters: bool
    local_buffers: list[str] | tuple[str, ...]
    on_nan_inf: Literal["stop", "skip", "off"]
    desync_check_steps: int
    noise_scale_steps: int

class Switches:
    adaptive_localsgd: Setting[bool, bool | AdaptiveLocalSGDSettings | AdaptiveLocalSGD]
    """Average weights after a period that follows the loss and the learning rate."""
    adaptive_localsgd_configs: Setting[AdaptiveLocalSGDValues, AdaptiveLocalSGDSettings]
    """Settings of `adaptive_localsgd`, each checked when it is written.

    - `init_k_steps`: period at the start
    - `begin_step`: updates that stay dense at the start
    - `max_k_steps`: the period never grows past this
    - `formula`: "fleet" puts init_k_steps inside the square root
    - `outer_lr`: learning rate of the outer optimizer; 1 takes the average as it is
    - `outer_momentum`: momentum of the outer optimizer; above 0 is DiLoCo
    - `outer_nesterov`: Nesterov's form of the outer momentum
    - `average_state`: average the optimizer state along with the parameters
    - `wire_dtype`: type in which changes of parameters travel
    - `overlap_steps`: updates that go on while an averaging is under way
    - `across_nodes_every`: averagings from one among all ranks to the next; others stay inside a node
    - `top_k`: largest entries of each chunk that are sent; None: all are
    - `chunk`: entries of a chunk, of which top_k are sent
    - `value_bits`: bits of an entry that top_k sends, beside its place
    - `error_decay`: what is left of a change that was kept back, a round later
    """
    amp: Setting[bool, bool | AmpSettings | Amp]
    """Compute the forward in 16 bits; for float16 the loss is scaled, and updates that overflow are skipped."""
    amp_configs: Setting[AmpValues, AmpSettings]
    """Settings of `amp`, each checked when it is written.

    - `dtype`: 16-bit type; None: bfloat16 where the device has it
    - `init_loss_scaling`: first loss scale (float16)
    - `incr_every_n_steps`: clean updates before the scale grows
    - `decr_every_n_nan_or_inf`: overflows in a row before it shrinks
    - `incr_ratio`: growth factor
    - `decr_ratio`: shrink factor
    - `use_dynamic_loss_scaling`: False keeps the first scale
    - `custom_black_list`: modules (names, patterns) or classes kept in float32
    """
    auto: Setting[bool, bool | AutoSettings | Auto]
    """Measure the model and the network, choose the other parts, and say why."""
    auto_configs: Setting[AutoValues, AutoSettings]
    """Settings of `auto`, each checked when it is written.

    - `risk`: the riskiest class of part it may choose
    - `trials`: candidates that are run for some real steps
    - `memory`: peak memory to stay under; None is what the device has
    - `global_batch`: samples of one update of all ranks; None: what one sample on each rank makes
    - `total_steps`: updates of the run, among which the seconds of compiling are shared out; None: not known
    - `plan`: file of the plan: used again if it fits, written if not
    """
    bf16_allreduce: Setting[bool, bool | BF16AllReduce]
    """Send gradients as bfloat16: half the bytes of float32."""
    clip_norm: Setting[bool, bool | ClipNormSettings | ClipNorm]
    """Limit the global norm of the reduced gradients."""
    clip_norm_configs: Setting[ClipNormValues, ClipNormSettings]
    """Settings of `clip_norm`, each checked when it is written.

    - `max_norm`: largest global norm of the reduced gradients
    """
    compile: Setting[bool, bool | CompileSettings | Compile]
    """Compile the forward of blocks or of the whole model, and with it their backward."""
    compile_configs: Setting[CompileValues, CompileSettings]
    """Settings of `compile`, each checked when it is written.

    - `scope`: each repeated block by itself, equal ones once; or the whole model
    - `mode`: what torch.compile aims at; those with recorded CUDA graphs need static shapes
    - `dynamic`: one graph for all shapes; None: once a shape changes; False: one for each shape
    """
    dgc: Setting[bool, bool | DGCSettings | DGC]
    """Send the few largest entries of each gradient and keep the rest for later updates."""
    dgc_configs: Setting[DGCValues, DGCSettings]
    """Settings of `dgc`, each checked when it is written.

    - `rampup_begin_step`: updates that stay dense at the start
    - `rampup_step`: updates over which the sparsity list is walked through
    - `sparsity`: shares of the entries that are kept back, in order
    - `min_numel`: tensors with fewer elements stay dense
    - `clip_norm`: of each worker's own gradient, scaled by N**-0.5; not in dense updates
    - `two_level`: dense inside a node, sparse between nodes
    """
    fp16_allreduce: Setting[bool, bool | FP16AllReduce]
    """Send gradients as float16: half the bytes of float32."""
    gradient_merge: Setting[bool, bool | GradientMergeSettings | GradientMerge]
    """Add up the gradients of several micro-batches before one update: a larger batch in the same memory."""
    gradient_merge_configs: Setting[GradientMergeValues, GradientMergeSettings]
    """Settings of `gradient_merge`, each checked when it is written.

    - `k_steps`: micro-batches that make one update
    - `avg`: mean over the micro-batches; False sums them, and the learning rate is yours to cut
    """
    lamb: Setting[bool, bool | LambSettings | Lamb]
    """Give each layer a trust ratio of its own, for Adam with very large batches."""
    lamb_configs: Setting[LambValues, LambSettings]
    """Settings of `lamb`, each checked when it is written.

    - `lamb_weight_decay`: weight decay, added to the Adam direction before the trust ratio
    - `exclude_from_weight_decay`: parts of parameter names without decay; "norm" and "bias" mean norm layers and biases
    - `always_adapt`: scale tensors without weight decay too
    """
    lars: Setting[bool, bool | LarsSettings | Lars]
    """Give each layer a learning rate of its own, for SGD with very large batches."""
    lars_configs: Setting[LarsValues, LarsSettings]
    """Settings of `lars`, each checked when it is written.

    - `lars_coeff`: trust coefficient: how far a layer may move relative to its norm
    - `lars_weight_decay`: weight decay inside the trust ratio
    - `epsilon`: added to the denominator of the trust ratio
    - `exclude_from_weight_decay`: parts of parameter names without decay; "norm" and "bias" mean norm layers and biases
    - `carry_norms`: keep each weight's norm from the last update (GPU kernels)
    """
    localsgd: Setting[bool, bool | LocalSGDSettings | LocalSGD]
    """Let ranks update on their own and average their weights every `k_steps` updates."""
    localsgd_configs: Setting[LocalSGDValues, LocalSGDSettings]
    """Settings of `localsgd`, each checked when it is written.

    - `k_steps`: updates between two averagings
    - `begin_step`: updates that stay dense at the start
    - `outer_lr`: learning rate of the outer optimizer; 1 takes the average as it is
    - `outer_momentum`: momentum of the outer optimizer; above 0 is DiLoCo
    - `outer_nesterov`: Nesterov's form of the outer momentum
    - `average_state`: average the optimizer state along with the parameters
    - `wire_dtype`: type in which changes of parameters travel
    - `overlap_steps`: updates that go on while an averaging is under way
    - `across_nodes_every`: averagings from one among all ranks to the next; others stay inside a node
    - `top_k`: largest entries of each chunk that are sent; None: all are
    - `chunk`: entries of a chunk, of which top_k are sent
    - `value_bits`: bits of an entry that top_k sends, beside its place
    - `error_decay`: what is left of a change that was kept back, a round later
    - `fragments`: parts of the model that are averaged in turns, each once in k_steps
    """
    muon: Setting[bool, bool | MuonSettings | Muon]
    """Orthogonalise the momentum of matrices, shared out between the ranks; AdamW keeps all other tensors."""
    muon_configs: Setting[MuonValues, MuonSettings]
    """Settings of `muon`, each checked when it is written.

    - `momentum`: momentum of the matrices
    - `nesterov`: orthogonalise where the momentum will be after one more such gradient
    - `ns_steps`: steps of the Newton-Schulz iteration
    - `muon_weight_decay`: decoupled weight decay of the matrices
    - `exclude`: what AdamW keeps: "embedding", "head", "norm", "bias" mean kinds of tensors, others are parts of names
    - `adjust_lr_fn`: how a matrix's shape scales the learning rate
    - `ns_coefficients`: coefficients of the iteration
    - `ns_dtype`: type in which the iteration runs, and in which its results travel
    """
    powersgd: Setting[bool, bool | PowerSGDSettings | PowerSGD]
    """Send low-rank factors of each gradient and keep the error for later updates."""
    powersgd_configs: Setting[PowerSGDValues, PowerSGDSettings]
    """Settings of `powersgd`, each checked when it is written.

    - `rank`: rank of the factors: more is closer to the gradient, and more bytes
    - `begin_step`: updates that stay dense at the start
    - `min_compression`: tensors that would shrink by less than this stay dense
    - `two_level`: dense inside a node, low-rank factors between nodes
    """
    quantized_allreduce: Setting[bool, bool | QuantizedAllReduceSettings | QuantizedAllReduce]
    """Send gradients as blockwise integers, and keep the rounding error for later updates."""
    quantized_allreduce_configs: Setting[QuantizedAllReduceValues, QuantizedAllReduceSettings]
    """Settings of `quantized_allreduce`, each checked when it is written.

    - `bits`: bits of each number on the wire
    - `block`: numbers that share a scale, which is 16 bits
    - `error_feedback`: what rounding loses is added to the next gradient; else it is gone
    """
    recompute: Setting[bool, bool | RecomputeSettings | Recompute]
    """Drop the activations of blocks in forward and compute them again in backward, which saves memory."""
    recompute_configs: Setting[RecomputeValues, RecomputeSettings]
    """Settings of `recompute`, each checked when it is written.

    - `checkpoints`: names or patterns of the modules to recompute; empty means every repeated block
    - `budget`: peak memory to stay under; the plan is then computed
    - `offload`: keep the inputs of recomputed blocks in host memory
    """
    sharding: Setting[bool, bool | ShardingSettings | Sharding]
    """Divide the optimizer's state, and the update, between the ranks."""
    sharding_configs: Setting[ShardingValues, ShardingSettings]
    """Settings of `sharding`, each checked when it is written.

    - `stage`: what is divided: 1, the optimizer's state; 2, the gradients too; 3, the weights too
    - `merge_sharded`: stage 2: reduce every micro-step of a merge window, and keep this rank's share of its sums alone
    - `sharding_degree`: ranks that divide one state between them, neighbours; None: all ranks of the run
    """
    sync_batch_norm: Setting[bool, bool | SyncBatchNorm]
    """Compute the statistics of BatchNorm over the joined batch of all ranks."""
    fuse_grad_size_in_MB: float
    """size of a bucket: gradients are sent in such pieces while backward goes on"""
    find_unused_parameters: bool
    """parameters may stay without a gradient; otherwise that is an error which names them"""
    local_buffers: list[str] | tuple[str, ...]
    """names or patterns of buffers that belong to each worker: never averaged; all others are kept equal"""
    on_nan_inf: Literal["stop", "skip", "off"]
    """a loss or gradient that is NaN or infinite: stop with an error, skip that update, or off: let it pass"""
    desync_check_steps: int
    """updates between two checks that all workers still hold the same model; 0: no check"""
    noise_scale_steps: int
    """updates between two measurements of the gradient noise scale, which tells the useful batch; 0: none"""
