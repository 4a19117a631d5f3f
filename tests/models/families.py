"""Our model families by model type."""

from penstock.core import extensions

FAMILIES = {name: extensions.FAMILIES.load(name) for name in extensions.FAMILIES.builtins}
