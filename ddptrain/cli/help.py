"""What is printed when help is asked for; apart from the verbs, whose import takes seconds."""

from collections.abc import Sequence
from pathlib import Path

from ddptrain.cli.argv import GROUPS
from ddptrain.cli.choices import choices, first_comment
from ddptrain.text import in_columns

SUMMARIES = {
    "train": "train a recipe; the verb itself may be left out",
    "launch": "train on several ranks, with restarts and exit codes for a scheduler",
    "evaluate": "the metrics of a run, as JSON",
    "predict": "what a trained model answers: pictures, text",
    "export": "a trained model as ONNX or torch.export's file",
    "checkpoint": "check a run's checkpoints, look into one, or write its weights as a plain file",
    "report": "runs or a sweep, side by side, as one HTML page",
    "bench": "which overrides make a step faster on this machine",
    "prove": "whether a recipe keeps its bits over kills and ranks",
    "find": "a learning rate, by a short training in which it rises",
    "doctor": "why a GPU is not used, or slow",
    "write": "a recipe's data set as files",
    "completion": "complete these words in bash or zsh",
}
OPTIONS = {
    "--config-dir, -cd <folder>": "find recipes and other choices there too, and the code that they name",
    "--env <NAME>": "let YAMLs read this environment variable: ${oc.env:NAME}",
    "--multirun, -m": "a sweep: a job for each combination of values: optim.lr=0.1,0.2",
    "--cfg, -c job|hydra|all": "print the config and train nothing",
    "--package, -p <section>": "with --cfg: this part alone",
    "--resolve": "with --cfg: with what each ${...} stands for",
    "--explain <key>": "which files and words have set a key",
    "--info, -i [<what>]": "how the config is composed: all|config|defaults|defaults-tree|plugins|searchpath",
    "--run, -r": "one run: the default",
    "--help, -h": "this; after a verb its words; after recipe=<name> all its keys and values",
    "--hydra-help": "of Hydra, which composes the config",
    "--version": "",
}
"""Of all verbs that train or know a run."""

_CHECKPOINT_WORDS = """\
  run=<folder>          the run, whose saved config is used; any of its keys may be overridden
  checkpoint=<which>    best (the default, where there is one), last, step-<n>, or a checkpoint's folder"""

TEXTS = {
    "completion": """\
ddptrain completion bash|zsh

Prints what the shell needs to complete verbs, options, keys, choices, recipes and run folders of the command
ddptrain. One line in ~/.bashrc or ~/.zshrc installs it:

  eval "$(ddptrain completion bash)"
  eval "$(ddptrain completion zsh)\"""",
    "launch": """\
python -m ddptrain launch [torchrun's options] recipe=<name> [overrides]

torchrun, with the config checked before a rank starts, restarts that work, and exit codes that a scheduler
can read. The options are torchrun's own (torchrun --help shows all); those that matter:

  --nproc-per-node=<n>|gpu|cpu    ranks on this node; by default one for each GPU, or one where there is none
  --max-restarts=<n>              start the ranks again, from the newest checkpoint, after a crash (0)
  --shutdown-timeout=<seconds>    how long ranks have to save when asked to stop, before they are killed (30)
  --nnodes=<n>|<min>:<max>        nodes (1). Several meet at an address, under a name for the job:
  --rdzv-backend=c10d --rdzv-endpoint=<host>:<port> --rdzv-id=<name>
  --rdzv-id=<name>                on one node too: started again under its name, a job finds its run folder

A config or an option that is wrong is refused before a rank starts. SIGTERM, SIGINT and SIGUSR1 are passed on
to the ranks, which save and stop. Hydra's options (--config-dir, --cfg job) work as without launch.

  python -m ddptrain launch --nproc-per-node=4 --max-restarts=3 recipe=mobilenet_cifar10 optim.lr=0.01

Exit codes:
    0  done
    1  a crash, after all restarts
    2  the input is wrong (config, data, checkpoint, device): not restarted
    4  the loss left the finite numbers: not restarted
   75  stopped on request, with a checkpoint: not restarted; start the same command again
   76  a rank hung and was named, after all restarts
  128 + n  a rank was killed by signal n (137: SIGKILL, 143: SIGTERM), after all restarts""",
    "report": """\
python -m ddptrain report <run's folder> [<another> ...] [out=<file.html>]
python -m ddptrain report <sweep's folder> [out=<file.html>]
python -m ddptrain report '<pattern>' [out=<file.html>]
python -m ddptrain report run=<folder> to=mlflow|wandb|trackio [project=<name>]

The results of a run, of several side by side, or of a sweep: a table here, and a page that is one file and
loads nothing, to keep or to send. A run that still goes on, or was killed, is shown as far as it got.

  out=<file.html>   where the page goes; by default report.html in the run's or the sweep's folder, and for
                    several runs in the nearest folder that holds them all
  to=<tracker>      send what a tracker lacks of these runs, from metrics.jsonl; each point once
  run=<folder>      the run, as a folder without run= is, too
  project=<name>    there; by default the run's own, or the recipe's name

The table: what differs in config and environment, the last and the best value of each metric (* marks the
best run), where the time went, and the one thing that would help most. The page has this and the curves,
pictures, texts, devices and the whole config, and the command that repeats each run.

  python -m ddptrain report runs/cnn_digits/2026-11-21_02-14-19-70d7f5
  python -m ddptrain report runs/a runs/b out=compared.html
  python -m ddptrain report 'runs/cnn_*/*'
  python -m ddptrain report sweeps/cnn_digits
  python -m ddptrain report run=runs/a to=mlflow""",
    "doctor": """\
python -m ddptrain doctor [device=auto|cuda|cuda:<i>|cpu] [workers=<n>] [port=<n>] [--json] [--cluster]
python -m ddptrain doctor facts=<file> [--json]

Why is my GPU not used, or slow? Looks at the machine, its driver and this PyTorch, computes on the device and
checks the result, and names the cause and the remedy of each problem.

  device=auto|cuda|cuda:<i>|cpu   what training will be asked for (auto). With cpu the GPUs are left out
  workers=<n>                     loader processes of each rank, for /dev/shm and cores (as training takes)
  port=<n>                        where torchrun's ranks shall meet (29500)
  facts=<file>                    judge what doctor --json printed, here or on another machine; ask nothing
  --json                          one JSON object: facts, findings, and how many of them are problems
  --cluster                       under torchrun: all nodes, their versions and clocks, and the links between

Levels:
  problem   the device can't be used, or a run will fail. One for each cause: what only follows is left out
  warning   it works, but slowly or not for long
  ok        looked at, and sound

  python -m ddptrain doctor
  python -m ddptrain doctor device=cpu workers=8
  python -m ddptrain doctor --json > doctor.json          # attach this to a report
  python -m ddptrain doctor facts=doctor.json
  torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=doctor \\
      --rdzv-endpoint=<first node>:29500 -m ddptrain doctor --cluster

Exit codes:
    0  no problem
    1  a problem; with --cluster on every rank, whichever node has it
    2  the words are wrong""",
    "bench": """\
python -m ddptrain bench recipe=<name> [overrides] [ranks=<n>] [steps=<n>] [rounds=<n>] [try='<a>;<b>']
                         [ddp=true]

Where the time of a step goes on this machine, and which overrides make it shorter: each is a separate
training, in turns with the training as it is, so that the ratios hold on a busy machine too.

  ranks=<n>    ranks of each training (1)
  steps=<n>    of the shortest lap (10); a lap lasts a second at least
  rounds=<n>   laps of each override, in turns with as many of the training as it is (6)
  try='...'    what to try, split by semicolons: try='precision=bf16;compile=default optim=adamw'. By default
               channels_last, precision, compile, data.resident, data.workers, the fused optimizer and, with
               several ranks, DDP's buckets and compression, as far as the recipe has them. try= tries nothing
  ddp=true     several ranks (by default one for each GPU, else two), and what DDP offers: its buckets, static
               graph, gradient views, compression

The table shows each one's time a step, its ratio to the training as it is (median, least and most of the
laps), its peak memory, and the split of its time; its first row is the training as it is against itself:
what gains no more than that differs by is not called faster. Below it stands the fastest command, to copy.
Nothing is saved or evaluated meanwhile, and what is trained is thrown away.

With ddp=true the table has what of the all-reduce is exposed: not hidden behind the backward pass.""",
    "evaluate": f"""\
python -m ddptrain evaluate run=<folder> [checkpoint=<which>] [overrides]

The metrics of a finished or running run, on any number of ranks (torchrun), as one JSON object on standard
output.

{_CHECKPOINT_WORDS}

  python -m ddptrain evaluate run=runs/mine data=imagefolder data.root=other""",
    "predict": f"""\
python -m ddptrain predict run=<folder> [checkpoint=<which>] [the task's own words]

What a trained model answers. It needs the checkpoint alone where that knows enough of the data (images,
detection).

{_CHECKPOINT_WORDS}

  images      source=<file|folder|'pattern'> [out=predictions] [top=3]: lines, predictions.csv, contact sheets
  detection   source=<file|folder|'pattern'> [out=predictions] [score=0.25]: pictures with boxes, labels
  text        [prompt='...'] [tokens=...] [temperature=...] [top_k=...] [seed=...]
  translation text='...' [beam=...]

  python -m ddptrain predict run=runs/cnn source=photos out=seen device=cpu""",
    "export": f"""\
python -m ddptrain export run=<folder> [checkpoint=<which>] format=onnx|pt2 [out=<file>] [its own words]

A file that runs without ddptrain, checked against the model on the same batch before it is called done.

{_CHECKPOINT_WORDS}
  batch=<n>             images: a model for that many at once; by default any number

  python -m ddptrain export run=runs/cnn format=onnx out=model.onnx""",
    "checkpoint": """\
python -m ddptrain checkpoint verify|show|convert run=<folder> [checkpoint=<which>] [out=<file>]
                                                                [weights=averaged|model]

  verify    are all of the run's checkpoints what was written?
  show      one's facts, sizes, norms, and a table of its tensors
  convert   plain weights to out=<file.pt|file.safetensors>, which load without ddptrain

  checkpoint=<which>    best, last, step-<n>, or a checkpoint's folder; by default verify reads all, show the
                        last, and convert the best, as evaluate, predict and export do""",
    "find": """\
python -m ddptrain find lr recipe=<name> [overrides] [steps=<n>] [lowest=<rate>] [highest=<rate>] [out=<file>]

The learning-rate range test (arXiv 1506.01186): a short training in which the rate rises by equal factors
until the loss diverges. Prints from where to where the loss falls, and the override to copy: a tenth of the
rate at which the loss is lowest. The model is thrown away. On several ranks under torchrun.

  steps=<n>                         200
  lowest=<rate>  highest=<rate>     1e-6 and 10
  out=<file>                        the picture (find-lr-<recipe>.png); its numbers lie beside it, as JSON

  python -m ddptrain find lr recipe=cnn_digits
  torchrun --standalone --nproc-per-node=2 -m ddptrain find lr recipe=mobilenet_cifar10""",
    "prove": """\
python -m ddptrain prove resume|world|eval recipe=<name> [overrides] [ranks=<n>] [out=<new folder>]

Whether a recipe keeps the engine's promises, by whole trainings that are compared bit for bit.

  resume    killed at random moments and started again, it ends with the same bits (kills=<n>)
  world     any number of ranks trains the same
  eval      any number of ranks finds the same metrics""",
    "write": """\
python -m ddptrain write recipe=<name> [overrides] layout=<one of the data's> out=<new folder>

Write a recipe's data set to disk: of detection as layout=yolo or coco.""",
}


def overview(folders: Sequence[Path]) -> str:
    """Every verb, option, recipe and choice. folders: of YAMLs."""
    recipes = [(f"  {name}", first_comment(path)) for name, path in choices("recipe", folders).items()]
    groups = [(f"  {group}=", ", ".join(choices(group, folders))) for group in GROUPS if group != "recipe"]
    return "\n".join(
        [
            "ddptrain [<verb>] recipe=<name> [<group>=<choice> ...] [<key>=<value> ...] [options]",
            "python -m ddptrain and, for several ranks, torchrun -m ddptrain take the same words.",
            "",
            "Verbs (ddptrain <verb> --help):",
            *in_columns([(f"  {name}", said) for name, said in SUMMARIES.items()]),
            "",
            "Options:",
            *in_columns([(f"  {name}", said) for name, said in OPTIONS.items()]),
            "  doctor has --json and --cluster, launch has torchrun's: --nproc-per-node=<n> and others.",
            "",
            "Recipes:",
            *in_columns(recipes),
            "",
            "Other groups and their choices:",
            *in_columns([row for row in groups if row[1]]),
            "",
            "All keys, their values and defaults: docs/config.md, or ddptrain recipe=<name> --help.",
        ]
    )
