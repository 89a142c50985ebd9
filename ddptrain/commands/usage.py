"""What ``launch --help`` prints; apart from the verb, whose import takes seconds."""

LAUNCH = """\
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
  128 + n  a rank was killed by signal n (137: SIGKILL, 143: SIGTERM), after all restarts"""
