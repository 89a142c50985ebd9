"""Many jobs on one node: a ledger of what was run, and a pool that packs the rest over GPUs or cores.

Nothing here imports torch: each job is a separate process.
"""
