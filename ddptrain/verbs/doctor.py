"""``doctor``: the machine, its GPUs and this PyTorch."""

from ddptrain.config.arguments import Arguments
from ddptrain.errors import UserError
from ddptrain.verbs.argv import split_words
from ddptrain.verbs.verb import Verb

HELP = """\
python -m ddptrain doctor [device=auto|cuda|cuda:<i>|cpu] [workers=<n>] [port=<n>] [--json] [--cluster]

Why is my GPU not used, or slow? Looks at the machine, its driver and this PyTorch, computes on the device and
checks the result, and names the cause and the remedy of each problem.

  device=auto|cuda|cuda:<i>|cpu   what training will be asked for (auto). With cpu the GPUs are left out
  workers=<n>                     loader processes of each rank, for /dev/shm and cores (as training takes)
  port=<n>                        where torchrun's ranks shall meet (29500)
  --json                          one JSON object: facts, findings, and how many of them are problems
  --cluster                       under torchrun: all nodes, their versions, and an all-reduce among all ranks

Levels:
  problem   the device can't be used, or a run will fail. One for each cause: what only follows is left out
  warning   it works, but slowly or not for long
  ok        looked at, and sound

  python -m ddptrain doctor
  python -m ddptrain doctor device=cpu workers=8
  python -m ddptrain doctor --json > doctor.json          # attach this to a report
  torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=doctor \\
      --rdzv-endpoint=<first node>:29500 -m ddptrain doctor --cluster

Exit codes:
    0  no problem
    1  a problem; with --cluster on every rank, whichever node has it
    2  the words are wrong"""


def doctor(arguments: Arguments) -> int:
    settings, rest = split_words(arguments.overrides, str.isidentifier)
    if rest:
        raise UserError(
            f"{rest[0]}: doctor takes words of the form name=value only: doctor --help lists them."
        )
    from ddptrain.doctor import run

    options = arguments.own_options
    return run.run(settings, as_json="--json" in options, cluster="--cluster" in options)


VERB = Verb(
    run=doctor,
    summary="why a GPU is not used, or slow",
    help=HELP,
    options=lambda _: {"--json": False, "--cluster": False},
)
