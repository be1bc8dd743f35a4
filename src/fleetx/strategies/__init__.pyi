"""Written by `make types` from the parts in this folder; not by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypedDict

from ..engine.slots import Part, Site, Slot

def catalogue() -> dict[str, type[Part]]:
    """Return every part by name, found by walking this folder.

    Examples:
        >>> sorted(X.strategies.catalogue())[:4]
        ['adaptive_localsgd', 'amp', 'auto', 'bf16_allreduce']
    """

class _BuiltPart(Part):
    def claims(self) -> frozenset[Slot]: ...
    def build(self, site: Site) -> Mapping[Slot, Any]: ...

__all__ = [
    "AdaptiveLocalSGD",
    "AdaptiveLocalSGDSettings",
    "Amp",
    "AmpSettings",
    "Auto",
    "AutoSettings",
    "BF16AllReduce",
    "ClipNorm",
    "ClipNormSettings",
    "Compile",
    "CompileSettings",
    "DGC",
    "DGCSettings",
    "FP16AllReduce",
    "GradientMerge",
    "GradientMergeSettings",
    "Lamb",
    "LambSettings",
    "Lars",
    "LarsSettings",
    "LocalSGD",
    "LocalSGDSettings",
    "Muon",
    "MuonSettings",
    "PowerSGD",
    "PowerSGDSettings",
    "QuantizedAllReduce",
    "QuantizedAllReduceSettings",
    "Recompute",
    "RecomputeSettings",
    "Sharding",
    "ShardingSettings",
    "SyncBatchNorm",
    "catalogue",
]

@dataclass(frozen=True, kw_only=True)
class AdaptiveLocalSGD(_BuiltPart):
    """Average weights after a period that follows the loss and the learning rate.

    Examples:
        >>> strategy = fleet.DistributedStrategy(adaptive_localsgd=X.strategies.AdaptiveLocalSGD(max_k_steps=8))
        >>> strategy.adaptive_localsgd_configs["max_k_steps"]
        8
    """

    init_k_steps: int
    """period at the start"""
    begin_step: int
    """updates that stay dense at the start"""
    max_k_steps: int
    """the period never grows past this"""
    formula: str
    """"fleet" puts init_k_steps inside the square root"""
    outer_lr: float
    """learning rate of the outer optimizer; 1 takes the average as it is"""
    outer_momentum: float
    """momentum of the outer optimizer; above 0 is DiLoCo"""
    outer_nesterov: bool
    """Nesterov's form of the outer momentum"""
    average_state: bool
    """average the optimizer state along with the parameters"""
    wire_dtype: str
    """type in which changes of parameters travel"""
    overlap_steps: int
    """updates that go on while an averaging is under way"""
    across_nodes_every: int
    """averagings from one among all ranks to the next; others stay inside a node"""
    top_k: int | None
    """largest entries of each chunk that are sent; None: all are"""
    chunk: int
    """entries of a chunk, of which top_k are sent"""
    value_bits: int
    """bits of an entry that top_k sends, beside its place"""
    error_decay: float
    """what is left of a change that was kept back, a round later"""
    def __init__(
        self,
        *,
        init_k_steps: int = 1,
        begin_step: int = 1,
        max_k_steps: int = 16,
        formula: Literal["paper", "fleet"] = "paper",
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        outer_nesterov: bool = False,
        average_state: bool = False,
        wire_dtype: Literal["float32", "bfloat16", "float16", "int8", "int4"] = "float32",
        overlap_steps: int = 0,
        across_nodes_every: int = 1,
        top_k: int | None = None,
        chunk: int = 4096,
        value_bits: Literal[2, 4, 8, 32] = 32,
        error_decay: float = 1.0,
    ) -> None: ...

class AdaptiveLocalSGDSettings(TypedDict, total=False):
    """Settings of `adaptive_localsgd` as a dict; keys left out keep their value, or their default."""

    init_k_steps: int
    """period at the start"""
    begin_step: int
    """updates that stay dense at the start"""
    max_k_steps: int
    """the period never grows past this"""
    formula: Literal["paper", "fleet"]
    """"fleet" puts init_k_steps inside the square root"""
    outer_lr: float
    """learning rate of the outer optimizer; 1 takes the average as it is"""
    outer_momentum: float
    """momentum of the outer optimizer; above 0 is DiLoCo"""
    outer_nesterov: bool
    """Nesterov's form of the outer momentum"""
    average_state: bool
    """average the optimizer state along with the parameters"""
    wire_dtype: Literal["float32", "bfloat16", "float16", "int8", "int4"]
    """type in which changes of parameters travel"""
    overlap_steps: int
    """updates that go on while an averaging is under way"""
    across_nodes_every: int
    """averagings from one among all ranks to the next; others stay inside a node"""
    top_k: int | None
    """largest entries of each chunk that are sent; None: all are"""
    chunk: int
    """entries of a chunk, of which top_k are sent"""
    value_bits: Literal[2, 4, 8, 32]
    """bits of an entry that top_k sends, beside its place"""
    error_decay: float
    """what is left of a change that was kept back, a round later"""

@dataclass(frozen=True, kw_only=True)
class Amp(_BuiltPart):
    """Compute the forward in 16 bits; for float16 the loss is scaled, and updates that overflow are skipped.

    Examples:
        >>> strategy = fleet.DistributedStrategy(amp=X.strategies.Amp(dtype="bfloat16"))
        >>> strategy.amp_configs["dtype"]
        'bfloat16'
    """

    dtype: str | None
    """16-bit type; None: bfloat16 where the device has it"""
    init_loss_scaling: float
    """first loss scale (float16)"""
    incr_every_n_steps: int
    """clean updates before the scale grows"""
    decr_every_n_nan_or_inf: int
    """overflows in a row before it shrinks"""
    incr_ratio: float
    """growth factor"""
    decr_ratio: float
    """shrink factor"""
    use_dynamic_loss_scaling: bool
    """False keeps the first scale"""
    custom_black_list: list[str]
    """modules (names, patterns) or classes kept in float32"""
    def __init__(
        self,
        *,
        dtype: Literal["bfloat16", "float16"] | None = None,
        init_loss_scaling: float = 32768.0,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        use_dynamic_loss_scaling: bool = True,
        custom_black_list: list[str] | tuple[str, ...] = ...,
    ) -> None: ...

class AmpSettings(TypedDict, total=False):
    """Settings of `amp` as a dict; keys left out keep their value, or their default."""

    dtype: Literal["bfloat16", "float16"] | None
    """16-bit type; None: bfloat16 where the device has it"""
    init_loss_scaling: float
    """first loss scale (float16)"""
    incr_every_n_steps: int
    """clean updates before the scale grows"""
    decr_every_n_nan_or_inf: int
    """overflows in a row before it shrinks"""
    incr_ratio: float
    """growth factor"""
    decr_ratio: float
    """shrink factor"""
    use_dynamic_loss_scaling: bool
    """False keeps the first scale"""
    custom_black_list: list[str] | tuple[str, ...]
    """modules (names, patterns) or classes kept in float32"""

@dataclass(frozen=True, kw_only=True)
class Auto(_BuiltPart):
    """Measure the model and the network, choose the other parts, and say why.

    It is never built: fleet.distribute(...) puts the chosen strategy in its place (auto/search.py).

    Examples:
        >>> strategy = fleet.DistributedStrategy(auto=X.strategies.Auto(risk="lossy", memory="20GiB"))
        >>> strategy.auto_configs["risk"]
        'lossy'
    """

    risk: str
    """the riskiest class of part it may choose"""
    trials: int
    """candidates that are run for some real steps"""
    memory: int | None
    """peak memory to stay under; None is what the device has"""
    global_batch: int | None
    """samples of one update of all ranks; None: what one sample on each rank makes"""
    total_steps: int | None
    """updates of the run, among which the seconds of compiling are shared out; None: not known"""
    plan: str | None
    """file of the plan: used again if it fits, written if not"""
    def __init__(
        self,
        *,
        risk: Literal["exact", "rounding", "lossy", "schedule"] = "rounding",
        trials: int = 3,
        memory: int | str | None = None,
        global_batch: int | None = None,
        total_steps: int | None = None,
        plan: str | PathLike[str] | None = None,
    ) -> None: ...

class AutoSettings(TypedDict, total=False):
    """Settings of `auto` as a dict; keys left out keep their value, or their default."""

    risk: Literal["exact", "rounding", "lossy", "schedule"]
    """the riskiest class of part it may choose"""
    trials: int
    """candidates that are run for some real steps"""
    memory: int | str | None
    """peak memory to stay under; None is what the device has"""
    global_batch: int | None
    """samples of one update of all ranks; None: what one sample on each rank makes"""
    total_steps: int | None
    """updates of the run, among which the seconds of compiling are shared out; None: not known"""
    plan: str | PathLike[str] | None
    """file of the plan: used again if it fits, written if not"""

@dataclass(frozen=True, kw_only=True)
class BF16AllReduce(_BuiltPart):
    """Send gradients as bfloat16: half the bytes of float32.

    Examples:
        >>> fleet.DistributedStrategy(bf16_allreduce=X.strategies.BF16AllReduce()).bf16_allreduce
        True
    """

    def __init__(self) -> None: ...

@dataclass(frozen=True, kw_only=True)
class ClipNorm(_BuiltPart):
    """Limit the global norm of the reduced gradients.

    Examples:
        >>> strategy = fleet.DistributedStrategy(clip_norm=X.strategies.ClipNorm(max_norm=0.5))
        >>> strategy.clip_norm_configs["max_norm"]
        0.5
    """

    max_norm: float
    """largest global norm of the reduced gradients"""
    def __init__(self, *, max_norm: float = 1.0) -> None: ...

class ClipNormSettings(TypedDict, total=False):
    """Settings of `clip_norm` as a dict; keys left out keep their value, or their default."""

    max_norm: float
    """largest global norm of the reduced gradients"""

@dataclass(frozen=True, kw_only=True)
class Compile(_BuiltPart):
    """Compile the forward of blocks or of the whole model, and with it their backward.

    Examples:
        >>> strategy = fleet.DistributedStrategy(amp=True, compile=X.strategies.Compile(scope="model"))
        >>> strategy.compile_configs["scope"]
        'model'
    """

    scope: str
    """each repeated block by itself, equal ones once; or the whole model"""
    mode: str
    """what torch.compile aims at; those with recorded CUDA graphs need static shapes"""
    dynamic: bool | None
    """one graph for all shapes; None: once a shape changes; False: one for each shape"""
    def __init__(
        self,
        *,
        scope: Literal["blocks", "model"] = "blocks",
        mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"] = "default",
        dynamic: bool | None = None,
    ) -> None: ...

class CompileSettings(TypedDict, total=False):
    """Settings of `compile` as a dict; keys left out keep their value, or their default."""

    scope: Literal["blocks", "model"]
    """each repeated block by itself, equal ones once; or the whole model"""
    mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
    """what torch.compile aims at; those with recorded CUDA graphs need static shapes"""
    dynamic: bool | None
    """one graph for all shapes; None: once a shape changes; False: one for each shape"""

@dataclass(frozen=True, kw_only=True)
class DGC(_BuiltPart):
    """Send the few largest entries of each gradient and keep the rest for later updates.

    Examples:
        >>> strategy = fleet.DistributedStrategy(dgc=X.strategies.DGC(sparsity=[0.99]))
        >>> strategy.dgc_configs["sparsity"]
        [0.99]
    """

    rampup_begin_step: int
    """updates that stay dense at the start"""
    rampup_step: int
    """updates over which the sparsity list is walked through"""
    sparsity: list[float]
    """shares of the entries that are kept back, in order"""
    min_numel: int
    """tensors with fewer elements stay dense"""
    clip_norm: float | None
    """of each worker's own gradient, scaled by N**-0.5; not in dense updates"""
    two_level: bool
    """dense inside a node, sparse between nodes"""
    def __init__(
        self,
        *,
        rampup_begin_step: int = 0,
        rampup_step: int = 1,
        sparsity: Sequence[float] = ...,
        min_numel: int = 16384,
        clip_norm: float | None = None,
        two_level: bool = False,
    ) -> None: ...

class DGCSettings(TypedDict, total=False):
    """Settings of `dgc` as a dict; keys left out keep their value, or their default."""

    rampup_begin_step: int
    """updates that stay dense at the start"""
    rampup_step: int
    """updates over which the sparsity list is walked through"""
    sparsity: Sequence[float]
    """shares of the entries that are kept back, in order"""
    min_numel: int
    """tensors with fewer elements stay dense"""
    clip_norm: float | None
    """of each worker's own gradient, scaled by N**-0.5; not in dense updates"""
    two_level: bool
    """dense inside a node, sparse between nodes"""

@dataclass(frozen=True, kw_only=True)
class FP16AllReduce(_BuiltPart):
    """Send gradients as float16: half the bytes of float32.

    Examples:
        >>> fleet.DistributedStrategy(fp16_allreduce=X.strategies.FP16AllReduce()).fp16_allreduce
        True
    """

    def __init__(self) -> None: ...

@dataclass(frozen=True, kw_only=True)
class GradientMerge(_BuiltPart):
    """Add up the gradients of several micro-batches before one update: a larger batch in the same memory.

    Examples:
        >>> strategy = fleet.DistributedStrategy(gradient_merge=X.strategies.GradientMerge(k_steps=4))
        >>> strategy.gradient_merge_configs["k_steps"]
        4
    """

    k_steps: int
    """micro-batches that make one update"""
    avg: bool
    """mean over the micro-batches; False sums them, and the learning rate is yours to cut"""
    def __init__(self, *, k_steps: int = 1, avg: bool = True) -> None: ...

class GradientMergeSettings(TypedDict, total=False):
    """Settings of `gradient_merge` as a dict; keys left out keep their value, or their default."""

    k_steps: int
    """micro-batches that make one update"""
    avg: bool
    """mean over the micro-batches; False sums them, and the learning rate is yours to cut"""

@dataclass(frozen=True, kw_only=True)
class Lamb(_BuiltPart):
    """Give each layer a trust ratio of its own, for Adam with very large batches.

    Examples:
        >>> strategy = fleet.DistributedStrategy(lamb=X.strategies.Lamb(always_adapt=True))
        >>> strategy.lamb_configs["lamb_weight_decay"]
        0.01
    """

    lamb_weight_decay: float
    """weight decay, added to the Adam direction before the trust ratio"""
    exclude_from_weight_decay: list[str]
    """parts of parameter names without decay; "norm" and "bias" mean norm layers and biases"""
    always_adapt: bool
    """scale tensors without weight decay too"""
    def __init__(
        self,
        *,
        lamb_weight_decay: float = 0.01,
        exclude_from_weight_decay: list[str] | tuple[str, ...] = ...,
        always_adapt: bool = False,
    ) -> None: ...

class LambSettings(TypedDict, total=False):
    """Settings of `lamb` as a dict; keys left out keep their value, or their default."""

    lamb_weight_decay: float
    """weight decay, added to the Adam direction before the trust ratio"""
    exclude_from_weight_decay: list[str] | tuple[str, ...]
    """parts of parameter names without decay; "norm" and "bias" mean norm layers and biases"""
    always_adapt: bool
    """scale tensors without weight decay too"""

@dataclass(frozen=True, kw_only=True)
class Lars(_BuiltPart):
    """Give each layer a learning rate of its own, for SGD with very large batches.

    Examples:
        >>> strategy = fleet.DistributedStrategy(lars=X.strategies.Lars(lars_coeff=0.02))
        >>> strategy.lars_configs["lars_coeff"]
        0.02
    """

    lars_coeff: float
    """trust coefficient: how far a layer may move relative to its norm"""
    lars_weight_decay: float
    """weight decay inside the trust ratio"""
    epsilon: float
    """added to the denominator of the trust ratio"""
    exclude_from_weight_decay: list[str]
    """parts of parameter names without decay; "norm" and "bias" mean norm layers and biases"""
    carry_norms: bool
    """keep each weight's norm from the last update (GPU kernels)"""
    def __init__(
        self,
        *,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        epsilon: float = 0.0,
        exclude_from_weight_decay: list[str] | tuple[str, ...] = ...,
        carry_norms: bool = False,
    ) -> None: ...

class LarsSettings(TypedDict, total=False):
    """Settings of `lars` as a dict; keys left out keep their value, or their default."""

    lars_coeff: float
    """trust coefficient: how far a layer may move relative to its norm"""
    lars_weight_decay: float
    """weight decay inside the trust ratio"""
    epsilon: float
    """added to the denominator of the trust ratio"""
    exclude_from_weight_decay: list[str] | tuple[str, ...]
    """parts of parameter names without decay; "norm" and "bias" mean norm layers and biases"""
    carry_norms: bool
    """keep each weight's norm from the last update (GPU kernels)"""

@dataclass(frozen=True, kw_only=True)
class LocalSGD(_BuiltPart):
    """Let ranks update on their own and average their weights every `k_steps` updates.

    Examples:
        >>> strategy = fleet.DistributedStrategy(localsgd=X.strategies.LocalSGD(k_steps=4))
        >>> strategy.localsgd_configs["k_steps"]
        4
    """

    k_steps: int
    """updates between two averagings"""
    begin_step: int
    """updates that stay dense at the start"""
    outer_lr: float
    """learning rate of the outer optimizer; 1 takes the average as it is"""
    outer_momentum: float
    """momentum of the outer optimizer; above 0 is DiLoCo"""
    outer_nesterov: bool
    """Nesterov's form of the outer momentum"""
    average_state: bool
    """average the optimizer state along with the parameters"""
    wire_dtype: str
    """type in which changes of parameters travel"""
    overlap_steps: int
    """updates that go on while an averaging is under way"""
    across_nodes_every: int
    """averagings from one among all ranks to the next; others stay inside a node"""
    top_k: int | None
    """largest entries of each chunk that are sent; None: all are"""
    chunk: int
    """entries of a chunk, of which top_k are sent"""
    value_bits: int
    """bits of an entry that top_k sends, beside its place"""
    error_decay: float
    """what is left of a change that was kept back, a round later"""
    fragments: int
    """parts of the model that are averaged in turns, each once in k_steps"""
    def __init__(
        self,
        *,
        k_steps: int = 1,
        begin_step: int = 1,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        outer_nesterov: bool = False,
        average_state: bool = False,
        wire_dtype: Literal["float32", "bfloat16", "float16", "int8", "int4"] = "float32",
        overlap_steps: int = 0,
        across_nodes_every: int = 1,
        top_k: int | None = None,
        chunk: int = 4096,
        value_bits: Literal[2, 4, 8, 32] = 32,
        error_decay: float = 1.0,
        fragments: int = 1,
    ) -> None: ...

class LocalSGDSettings(TypedDict, total=False):
    """Settings of `localsgd` as a dict; keys left out keep their value, or their default."""

    k_steps: int
    """updates between two averagings"""
    begin_step: int
    """updates that stay dense at the start"""
    outer_lr: float
    """learning rate of the outer optimizer; 1 takes the average as it is"""
    outer_momentum: float
    """momentum of the outer optimizer; above 0 is DiLoCo"""
    outer_nesterov: bool
    """Nesterov's form of the outer momentum"""
    average_state: bool
    """average the optimizer state along with the parameters"""
    wire_dtype: Literal["float32", "bfloat16", "float16", "int8", "int4"]
    """type in which changes of parameters travel"""
    overlap_steps: int
    """updates that go on while an averaging is under way"""
    across_nodes_every: int
    """averagings from one among all ranks to the next; others stay inside a node"""
    top_k: int | None
    """largest entries of each chunk that are sent; None: all are"""
    chunk: int
    """entries of a chunk, of which top_k are sent"""
    value_bits: Literal[2, 4, 8, 32]
    """bits of an entry that top_k sends, beside its place"""
    error_decay: float
    """what is left of a change that was kept back, a round later"""
    fragments: int
    """parts of the model that are averaged in turns, each once in k_steps"""

@dataclass(frozen=True, kw_only=True)
class Muon(_BuiltPart):
    """Orthogonalise the momentum of matrices, shared out between the ranks; AdamW keeps all other tensors.

    Examples:
        >>> strategy = fleet.DistributedStrategy(muon=X.strategies.Muon(muon_weight_decay=0.05))
        >>> strategy.muon_configs["ns_steps"]
        5
    """

    momentum: float
    """momentum of the matrices"""
    nesterov: bool
    """orthogonalise where the momentum will be after one more such gradient"""
    ns_steps: int
    """steps of the Newton-Schulz iteration"""
    muon_weight_decay: float
    """decoupled weight decay of the matrices"""
    exclude: list[str]
    """what AdamW keeps: "embedding", "head", "norm", "bias" mean kinds of tensors, others are parts of names"""
    adjust_lr_fn: str
    """how a matrix's shape scales the learning rate"""
    ns_coefficients: list[float]
    """coefficients of the iteration"""
    ns_dtype: str
    """type in which the iteration runs, and in which its results travel"""
    def __init__(
        self,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        muon_weight_decay: float = 0.1,
        exclude: list[str] | tuple[str, ...] = ...,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        ns_coefficients: Sequence[float] = ...,
        ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16",
    ) -> None: ...

class MuonSettings(TypedDict, total=False):
    """Settings of `muon` as a dict; keys left out keep their value, or their default."""

    momentum: float
    """momentum of the matrices"""
    nesterov: bool
    """orthogonalise where the momentum will be after one more such gradient"""
    ns_steps: int
    """steps of the Newton-Schulz iteration"""
    muon_weight_decay: float
    """decoupled weight decay of the matrices"""
    exclude: list[str] | tuple[str, ...]
    """what AdamW keeps: "embedding", "head", "norm", "bias" mean kinds of tensors, others are parts of names"""
    adjust_lr_fn: Literal["original", "match_rms_adamw"]
    """how a matrix's shape scales the learning rate"""
    ns_coefficients: Sequence[float]
    """coefficients of the iteration"""
    ns_dtype: Literal["bfloat16", "float32", "float64"]
    """type in which the iteration runs, and in which its results travel"""

@dataclass(frozen=True, kw_only=True)
class PowerSGD(_BuiltPart):
    """Send low-rank factors of each gradient and keep the error for later updates.

    Examples:
        >>> strategy = fleet.DistributedStrategy(powersgd=X.strategies.PowerSGD(rank=8))
        >>> strategy.powersgd_configs["rank"]
        8
    """

    rank: int
    """rank of the factors: more is closer to the gradient, and more bytes"""
    begin_step: int
    """updates that stay dense at the start"""
    min_compression: float
    """tensors that would shrink by less than this stay dense"""
    two_level: bool
    """dense inside a node, low-rank factors between nodes"""
    def __init__(self, *, rank: int = 4, begin_step: int = 10, min_compression: float = 2.0, two_level: bool = False) -> None: ...

class PowerSGDSettings(TypedDict, total=False):
    """Settings of `powersgd` as a dict; keys left out keep their value, or their default."""

    rank: int
    """rank of the factors: more is closer to the gradient, and more bytes"""
    begin_step: int
    """updates that stay dense at the start"""
    min_compression: float
    """tensors that would shrink by less than this stay dense"""
    two_level: bool
    """dense inside a node, low-rank factors between nodes"""

@dataclass(frozen=True, kw_only=True)
class QuantizedAllReduce(_BuiltPart):
    """Send gradients as blockwise integers, and keep the rounding error for later updates.

    Examples:
        >>> strategy = fleet.DistributedStrategy(quantized_allreduce=X.strategies.QuantizedAllReduce(bits=4))
        >>> strategy.quantized_allreduce_configs["bits"]
        4
    """

    bits: int
    """bits of each number on the wire"""
    block: int
    """numbers that share a scale, which is 16 bits"""
    error_feedback: bool
    """what rounding loses is added to the next gradient; else it is gone"""
    def __init__(self, *, bits: Literal[8, 4] = 8, block: int = 256, error_feedback: bool = True) -> None: ...

class QuantizedAllReduceSettings(TypedDict, total=False):
    """Settings of `quantized_allreduce` as a dict; keys left out keep their value, or their default."""

    bits: Literal[8, 4]
    """bits of each number on the wire"""
    block: int
    """numbers that share a scale, which is 16 bits"""
    error_feedback: bool
    """what rounding loses is added to the next gradient; else it is gone"""

@dataclass(frozen=True, kw_only=True)
class Recompute(_BuiltPart):
    """Drop the activations of blocks in forward and compute them again in backward, which saves memory.

    Examples:
        >>> strategy = fleet.DistributedStrategy(recompute=X.strategies.Recompute(budget="20GB"))
        >>> strategy.recompute_configs["budget"]
        20000000000
    """

    checkpoints: list[str]
    """names or patterns of the modules to recompute; empty means every repeated block"""
    budget: int | None
    """peak memory to stay under; the plan is then computed"""
    offload: bool
    """keep the inputs of recomputed blocks in host memory"""
    def __init__(
        self, *, checkpoints: list[str] | tuple[str, ...] = ..., budget: int | str | None = None, offload: bool = False
    ) -> None: ...

class RecomputeSettings(TypedDict, total=False):
    """Settings of `recompute` as a dict; keys left out keep their value, or their default."""

    checkpoints: list[str] | tuple[str, ...]
    """names or patterns of the modules to recompute; empty means every repeated block"""
    budget: int | str | None
    """peak memory to stay under; the plan is then computed"""
    offload: bool
    """keep the inputs of recomputed blocks in host memory"""

@dataclass(frozen=True, kw_only=True)
class Sharding(_BuiltPart):
    """Divide the optimizer's state, and the update, between the ranks.

    Examples:
        >>> strategy = fleet.DistributedStrategy(sharding=X.strategies.Sharding(stage=1))
        >>> strategy.sharding_configs["stage"]
        1
    """

    stage: int
    """what is divided: 1, the optimizer's state; 2, the gradients too; 3, the weights too"""
    merge_sharded: bool
    """stage 2: reduce every micro-step of a merge window, and keep this rank's share of its sums alone"""
    sharding_degree: int | None
    """ranks that divide one state between them, neighbours; None: all ranks of the run"""
    def __init__(self, *, stage: int = 1, merge_sharded: bool = False, sharding_degree: int | None = None) -> None: ...

class ShardingSettings(TypedDict, total=False):
    """Settings of `sharding` as a dict; keys left out keep their value, or their default."""

    stage: int
    """what is divided: 1, the optimizer's state; 2, the gradients too; 3, the weights too"""
    merge_sharded: bool
    """stage 2: reduce every micro-step of a merge window, and keep this rank's share of its sums alone"""
    sharding_degree: int | None
    """ranks that divide one state between them, neighbours; None: all ranks of the run"""

@dataclass(frozen=True, kw_only=True)
class SyncBatchNorm(_BuiltPart):
    """Compute the statistics of BatchNorm over the joined batch of all ranks.

    Examples:
        >>> fleet.DistributedStrategy(sync_batch_norm=X.strategies.SyncBatchNorm()).sync_batch_norm
        True
    """

    def __init__(self) -> None: ...
