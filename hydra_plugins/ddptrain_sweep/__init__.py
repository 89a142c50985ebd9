"""What Hydra finds of ddptrain's by scanning ``hydra_plugins``, a namespace that must have no __init__.py.

Scanned, and so imported, at each start of any Hydra program: the modules here import Hydra alone.
"""
