"""The private names of torch that a step needs: the versions, and the cost without them. Those that other
files use are listed in tests/structure/test_private_names.py.

| name | torch | without it |
|---|---|---|
| `Variable._execution_engine.run_backward` | 2.11 to 2.15 | `torch.autograd.backward`: 19 us a step |
| `Optimizer.step` below its wrapper | 2.11 to 2.15 | `optimizer.step()`: 29 us a step |
| DDP's `_pre_forward`, `_run_ddp_forward`, `_post_forward` | 2.11 to 2.15 | a range: 25 us a step |
| `torch._compile`'s mark on functions, `Optimizer`'s `_use_grad` | 2.11 to 2.15 | 0.7 s at each start |
| `Variable._execution_engine.queue_callback` | 2.11 to 2.15 | called at once: `all_reduce` is timed wrongly |
| `torch._amp_foreach_non_finite_check_and_unscale_` | 2.11 to 2.15 | a check of each gradient: launches |
| `torch._C._autograd._profiler_enabled` | 2.11 to 2.15 | ranges for a profiler in each step |
| DDP's `_assign_modules_buffers` | 2.11 to 2.15 | a buffer that a pass makes differs between ranks |
| DDP's `_set_ddp_runtime_logging_sample_rate` | 2.11 to 2.15 | waits in each hundredth step |
| `torch._cudnn_rnn` | 2.11 to 2.15 | recurrent layers under bf16 compute in fp16 on GPUs |
| `aten.mkldnn_rnn_layer`, `mkldnn._is_mkldnn_bf16_supported` | 2.11 to 2.15 | bf16 LSTMs end on older CPUs |
| `torch._foreach_*` | 2.11 to 2.15 | a launch for each parameter |
| `_distributed_c10d._dump_nccl_trace_json` | 2.11 to 2.15 | a hang's report lacks the collective |

The microseconds refer to a step of 280, measured in alternating turns. With a torch that lacks a name, the
public alternative is used, as in tests/engine/test_torch_private.py.
"""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_engine: Any = getattr(Variable, "_execution_engine", None)
_run_backward = getattr(_engine, "run_backward", None)
_queue_callback = getattr(_engine, "queue_callback", None)
is_profiled: Callable[[], bool] = getattr(torch._C._autograd, "_profiler_enabled", lambda: True)
"""Whether torch's profiler records this process."""

_MARK = "__dynamo_disable"
"""Where torch/_compile.py stores the form of a function that is excluded from compilation."""
_WRAPPER = "_use_grad"
"""The name of torch/optim/optimizer.py's wrapper of each optimizer's step."""
_CUDNN_WITH_BF16_RNNS = 91300
_DDPS_FORWARD = (
    *("torch", "autograd", "profiler", "record_function"),
    *(
        "_pre_forward",
        "_delay_all_reduce_all_params",
        "module",
        "forward",
        "_run_ddp_forward",
        "_post_forward",
    ),
)
"""The names in the code of DDP's forward that `lean_forward` stands for."""
_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def spare_dynamo() -> None:
    """Keep torch's optimizers from importing torch._dynamo unless it is used."""
    for name in _METHODS:
        spare_dynamo_in(getattr(Optimizer, name))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            step = vars(kind).get("step")
            if step is not None and step.__code__.co_name == _WRAPPER:
                kind.step = _unbroken(step)  # type: ignore[method-assign]


def spare_dynamo_in(wrapper: Callable[..., Any] | None) -> None:
    """Let a function that torch excludes from compilation run without importing torch._dynamo, as long as
    nothing else has imported it."""
    function = getattr(wrapper, "__wrapped__", None)
    if wrapper is None or function is None or hasattr(function, _MARK):
        return

    def called(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **named)
        if getattr(function, _MARK, None) is called:
            delattr(function, _MARK)
        return wrapper(*arguments, **named)

    setattr(function, _MARK, called)


@contextmanager
def sparing_dynamo() -> Iterator[None]:
    """Around the constructor of DistributedDataParallel: inside, it finds the default of a setting of
    torch._dynamo without importing it."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    context_manager = getattr(DistributedDataParallel, "_inside_ddp_forward", None)
    spare_dynamo_in(getattr(context_manager, "__wrapped__", None))
    utils = _Unimported("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in = vars(torch)["_dynamo"] = _Unimported("torch._dynamo", utils=utils)
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is stand_in:
            del vars(torch)["_dynamo"]


class _Unimported:
    """A stand-in with some of a module's names; imports the module for any other."""

    def __init__(self, module: str, **known: Any) -> None:
        self._module = module
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


def _unbroken(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's wrapper of a step, without graph breaks if the compiler is not imported."""
    inner: Callable[..., Any] = vars(step)["__wrapped__"]

    @functools.wraps(inner)
    def called(optimizer: Optimizer, *arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(optimizer, *arguments, **named)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return inner(optimizer, *arguments, **named)

    return called


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """``torch.autograd.backward`` without its argument checks."""
    if _run_backward is None:
        torch.autograd.backward(roots, gradients)
    else:
        _run_backward(
            tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """To be called within a backward pass: run a callback at its end, before those queued later."""
    if _queue_callback is None:
        callback()
    else:
        _queue_callback(callback)


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """As after ``update``: a step that was given up may have unscaled its gradients."""
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()


def check_finite(tensors: list[Tensor], nonfinite: Tensor, one: Tensor) -> None:
    """Set ``nonfinite`` (0-d) to 1 if any number is not finite, in one pass over tensors of one dtype. The
    operator also multiplies by ``one``, which changes nothing."""
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, nonfinite, one)


def lean_step(optimizer: Optimizer) -> Callable[[], object] | None:
    """An optimizer's step without torch's wrapper (profiler range, hooks, schedule's counter); None where it
    has another wrapper. To be called only without `step_hooks` and profiler."""
    wrapped, own = type(optimizer).step, vars(optimizer).get("step")
    wrapper = getattr(Optimizer, "profile_hook_step", None)
    by_torch = wrapper is not None and getattr(wrapped, "__code__", None) is wrapper(_nothing).__code__
    if not by_torch or not (own is None or hasattr(own, "_wrapped_by_lr_sched")):
        return None
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or the schedule would warn
    return partial(vars(wrapped)["__wrapped__"], optimizer)


def step_hooks(optimizer: Optimizer) -> tuple[dict[int, Any], ...]:
    """What is called around an optimizer's step: tables that fill up later."""
    own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    shared = [getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", {}) for when in ("pre", "post")]
    return (*own, *shared)


def _nothing() -> None: ...


def never_time(wrapped: DistributedDataParallel) -> None:
    """DDP times itself in its first ten passes and in each hundredth, for which the host reads events: not in
    the hundredth."""
    choose = getattr(wrapped, "_set_ddp_runtime_logging_sample_rate", None)
    if choose is not None:
        choose(2**31 - 1)


def found_static_outputs(ddp: DistributedDataParallel) -> bool:
    """Under ``static_graph``, after the first backward pass: whether DDP has been reached from the model's
    outputs, among which it looks for tensors. If not, it never sends a gradient, and says nothing."""
    return bool(getattr(ddp, "_static_graph_delay_allreduce_enqueued", True))


def find_late_buffers(ddp: DistributedDataParallel) -> None:
    """DDP asks whether there are buffers before it looks for those that a pass has made: from here on it
    looks first, in each pass, where the model has none yet."""
    look = getattr(ddp, "_assign_modules_buffers", None)
    if look is not None and next(ddp.buffers(), None) is None:
        ddp.register_forward_pre_hook(lambda *_: look())


def lean_forward(ddp: DistributedDataParallel) -> None:
    """From here on DDP's forward opens its range for the profiler only where one records. With a torch whose
    forward does other things it is left alone."""
    wrapped: Any = ddp
    whole = wrapped.forward
    code = getattr(whole, "__code__", None)
    if code is None or code.co_names != _DDPS_FORWARD or wrapped._delay_all_reduce_all_params:
        return

    def forward(*inputs: Any, **named: Any) -> Any:
        if is_profiled():
            return whole(*inputs, **named)
        inputs, named = wrapped._pre_forward(*inputs, **named)
        return wrapped._post_forward(wrapped._run_ddp_forward(*inputs, **named))

    wrapped.forward = forward


def register_generator(graph: torch.cuda.CUDAGraph, generator: torch.Generator) -> None:
    """Before the graph captures: it will draw from this generator, too. From 2.14 on torch knows by itself,
    and warns of the call."""
    if torch.__version__ < "2.14":
        graph.register_generator_state(generator)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether it checks ``found_inf`` on the device, as GradScaler expects of fused optimizers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def fused_sgd_is_wrong(parameters: Iterable[Tensor]) -> bool:
    """Before torch 2.14 it leaves most numbers of bf16 and fp16 parameters on a CPU as they are, and takes
    uninitialised memory for their momentum (pytorch#191763)."""
    return torch.__version__ < "2.14" and any(
        p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16) for p in parameters
    )


def is_dense(parameter: Tensor) -> bool:
    """Whether its numbers fill its memory without gaps. Of others torch's fused optimizers (2.11 to 2.15, on
    CPUs) update the wrong numbers, without an error."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def nccl_trace() -> bytes:
    """NCCL's flight recorder as JSON: ``entries``, the collectives of this process. Empty where it lacks."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)
    return b"" if dump is None else dump(True, False)


@functools.cache
def rnns_in_autocasts_dtype() -> torch.library.Library | None:
    """From here on, cuDNN's recurrent layers compute in the dtype of the autocast around them: torch's own
    kernel (2.11 to 2.15) casts them to fp16 under bf16, too, where no scaler keeps their gradients from being
    subnormal. cuDNN computes in bf16 from 9.13 on; with an older one it is float32.

    The kernel is replaced as long as what this returns is held.
    """
    if not hasattr(torch, "_cudnn_rnn"):
        return None

    def cast_and_call(
        x: Tensor, weights: Sequence[Tensor], stride: int, buffer: Tensor | None, *states_and_rest: Any
    ) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        if dtype == torch.bfloat16 and (torch.backends.cudnn.version() or 0) < _CUDNN_WITH_BF16_RNNS:
            dtype = torch.float32

        def cast(tensor: Tensor) -> Tensor:
            return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

        hx, cx, *rest = states_and_rest
        with torch.autocast("cuda", enabled=False):
            # the buffer is the weights as they are, in one piece; torch makes another of cast ones
            given = [cast(weight) for weight in weights]
            whole = buffer if given[0] is weights[0] else None
            cx = None if cx is None else cast(cx)
            return torch._cudnn_rnn(cast(x), given, stride, whole, cast(hx), cx, *rest)

    # cast weights are copies, which are put into one piece at every call, as torch's own kernel does
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous", module=__name__)
    return _replace_kernel("_cudnn_rnn", cast_and_call, "AutocastCUDA")


@functools.cache
def lstms_in_what_the_cpu_has() -> torch.library.Library | None:
    """From here on, an LSTM under bf16 or fp16 is float32 on a CPU for which oneDNN has none in that dtype
    (without AVX-512), as a GRU is on every CPU: torch (2.15) asks oneDNN all the same, which raises.

    The kernel is replaced as long as what this returns is held.
    """
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if not all(hasattr(torch.ops.mkldnn, name) for name in names.values()):
        return None
    has = {dtype: getattr(torch.ops.mkldnn, name)() for dtype, name in names.items()}

    def cast_and_call(*given: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        dtype = dtype if has.get(dtype) else torch.float32
        cast = [one.to(dtype) if isinstance(one, Tensor) else one for one in given]
        with torch.autocast("cpu", enabled=False):
            return torch.ops.aten.mkldnn_rnn_layer(*cast)

    return _replace_kernel("mkldnn_rnn_layer", cast_and_call, "AutocastCPU")


def _replace_kernel(name: str, kernel: Callable[..., Any], key: str) -> torch.library.Library:
    """As long as what this returns is held."""
    kernels = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch 2.11 warns that there is one
        kernels.impl(name, kernel, key)
    return kernels
