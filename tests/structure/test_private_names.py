"""Private names of other packages, found in the syntax tree: one more needs a reason. Those of torch that the
step needs are in one file, with what happens where a torch lacks one."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.structure.import_graph import FILES, ROOT

ONE_FILE = "ddptrain/torch_private.py"
PUBLIC = ("_asdict", "_make", "_foreach_")
"""Of named tuples; torch lists its foreach operators in its documentation."""
BY_TEXT = ("getattr", "hasattr", "setattr", "import_module")
ELSEWHERE = {
    "ddptrain/config/explain.py": {
        "_load_single_config",
        "_parse_overrides_and_create_caching_repo",
        "_internal",
    },
    "ddptrain/config/limits.py": {"_resolvers"},
    "ddptrain/config/search_path.py": {"_get_header_dict", "_normalize_file_name", "_internal"},
    "ddptrain/distributed/comm.py": {
        "_C",
        "_distributed_c10d",  # the type of a store
        "_non_persistent_buffers_set",
    },
    "ddptrain/distributed/launcher/agent.py": {
        "_pcontext",
        "_restart_workers",
        "_shutdown",
        "_shutdown_timeout",
        "_worker_group",
        "LocalElasticAgent",
    },
    "ddptrain/distributed/launcher/prefork.py": {"_stderr", "_stdout", "get_subprocess_handler", "_dynamo"},
    "ddptrain/distributed/launcher/process.py": {"_run_exitfuncs"},
    "ddptrain/distributed/launcher/rendezvous.py": {"_state_holder"},
    "ddptrain/distributed/snapshot.py": {"_non_persistent_buffers_set"},
    "ddptrain/distributed/watchdog/hang_report.py": {"_DummyThread", "_current_frames"},
    "ddptrain/distributed/watchdog/heartbeat.py": {"_get_default_store", "_C", "_distributed_c10d"},
    "ddptrain/doctor/torch_facts.py": {"_C", "_cuda_getArchFlags"},  # which GPUs torch was built for
    "ddptrain/engine/compiled.py": {
        "_call_impl",  # a layer with its hooks, which is left eager
        "_torchdynamo_orig_callable",
        "_dynamo",
        "_logging",
        "_internal",
        "_pytree",
    },
    "ddptrain/engine/flops.py": {"_FlopCounterMode"},
    "ddptrain/engine/freeze.py": {"_BatchNorm"},
    "ddptrain/engine/recompute.py": {"_NormBase"},
    "ddptrain/engine/warmup.py": {"_BatchNorm", "_DropoutNd"},
    "ddptrain/observe/monitor.py": {"_get_default_store", "_C", "_distributed_c10d"},
    "ddptrain/observe/profile.py": {
        "_dump_snapshot",
        "_record_memory_history",
    },  # torch's own pages name these
    "ddptrain/observe/tensorboard.py": {"_get_file_writer"},
    "ddptrain/run/file_formats.py": {
        "_dynamo",  # the error that torch.export raises
        "_offline_transformations",  # OpenVINO's, of which the public function sends usage data
    },
    "ddptrain/run/train.py": {"_BatchNorm", "_DropoutNd"},
    "ddptrain/strategies/fsdp.py": {"_BatchNorm", "_pytree"},
    "ddptrain/strategies/flag_bucket.py": {"_modules"},
    "ddptrain/testing.py": {"_dynamo"},
    "ddptrain/tools/prove/world.py": {"_BatchNorm"},
    "ddptrain/tools/sweep/hydra_sweep.py": {"_apply_overrides_to_config", "_internal"},
    "ddptrain/verbs/launch.py": {"_actions"},
    "hydra_plugins/ddptrain_sweep/pool.py": {"_internal"},
    "recipes/classifiers.py": {"_BatchNorm"},
    "recipes/muon.py": {"_step_supports_amp_scaling"},  # how an optimizer says that it reads found_inf
    "recipes/muon_with_adamw.py": {"_step_supports_amp_scaling"},
    "ddptrain/python/objects.py": {"_orig_mod"},  # of a compiled model, which is refused
    "recipes/outputs.py": {"_orig_mod"},
    "recipes/batch_metrics.py": {"_reductions"},  # torchmetrics': how each state of a metric is merged
}


def test_private_names_of_others() -> None:
    trees = {str(file): ast.parse((ROOT / file).read_text()) for file in FILES}
    ours = {name for tree in trees.values() for name in defined(tree)} - {"_step_supports_amp_scaling"}
    used = {file: {name for name in named(tree) if name not in ours} for file, tree in trees.items()}
    assert used.pop(ONE_FILE)
    found = {file: names for file, names in used.items() if names}
    assert found == ELSEWHERE


def test_the_one_file_says_what_it_uses() -> None:
    page = Path(ROOT / ONE_FILE).read_text().split('"""')[1]
    for name in ("run_backward", "queue_callback", "_amp_foreach_non_finite_check_and_unscale_", "_use_grad"):
        assert name in page


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that are given here: to functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def named(tree: ast.AST) -> Iterator[str]:
    """Private parts of imports, of attributes and of names in text; and what is reached by ``vars``."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Name):
            names = [ast.unparse(node.targets[0])]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_TEXT:
            names = [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch._"):
            names = [str(node.value)] if str(node.value).replace(".", "").isidentifier() else []
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            yield ast.unparse(node.slice).strip("'")
        for name in names:
            if "ddptrain" not in name:
                yield from filter(is_private, name.split("."))


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and part != "_" and not part.startswith(PUBLIC)
