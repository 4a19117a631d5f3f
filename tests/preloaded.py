"""What the warm server of `ranks.py` imports before it forks ranks.

Imports make no garbage, and no rank looks for any among what it inherits: that would copy the pages
of a million objects in each.
"""

import gc
import importlib

from tests.ranks import PRELOADED

gc.disable()
for module in PRELOADED:
    importlib.import_module(module)
gc.freeze()
gc.enable()
