"""Keys of a message that say whether, or with what loss weight, it is trained, under the names of
several libraries."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.prepare.bad_records import BadRecord, check_weight, describe_value


@dataclass(frozen=True)
class Flag:
    """What the values of a key mean."""

    trains: bool = True
    """Whether a message with the value true is trained; else it is masked."""
    is_boolean: bool = False
    """Whether numbers are refused, because 1 may mean either."""
    is_factor: bool = False
    """Whether it multiplies the loss: it may be any loss weight, and messages without a loss remain
    without."""


FLAGS: Mapping[str, Flag] = {
    "weight": Flag(is_factor=True),  # OpenAI's fine-tuning API, mistral-finetune, OpenChat, axolotl
    "train": Flag(),  # axolotl
    "training": Flag(),  # axolotl
    "trainable": Flag(),
    "train_on": Flag(),
    "loss": Flag(),  # ms-swift, XTuner
    "loss_mask": Flag(),  # slime, SkyRL: 1 is trained
    "masked": Flag(trains=False),  # torchtune
    "mask": Flag(trains=False, is_boolean=True),
}

WORDS: Mapping[str, bool] = {"true": True, "false": False}


def message_weight(
    location: str,
    message: Mapping[str, Any],
    flags: Mapping[str, Flag],
    role: str,
    trained_roles: Collection[str],
) -> float:
    """Loss weight of a message, 0 if it is not trained: as its flags say, else 1 if its role is
    trained.

    Raises BadRecord for values with no meaning, for flags that contradict one another, and for
    those that train a message of another role.
    """
    if flags.keys().isdisjoint(message):
        return float(role in trained_roles)
    written = {
        name: parse_flag(f"{location}.{name}", message[name], flag)
        for name, flag in flags.items()
        if message.get(name) is not None
    }
    if role not in trained_roles:
        for name, weight in written.items():
            if weight and not flags[name].is_factor:
                why = f"{location}.{name} is {message[name]}; roles_to_train does not have {role}"
                raise BadRecord("bad_value", why)
        return 0.0
    if len({weight > 0 for weight in written.values()}) > 1:
        values = " and ".join(f"{name}: {message[name]}" for name in written)
        raise BadRecord("bad_value", f"{location} has {values}, which contradict one another")
    return math.prod(written.values())


def parse_flag(location: str, value: Any, flag: Flag) -> float:
    """The loss weight that a flag gives its message."""
    if isinstance(value, str):
        value = WORDS.get(value.strip().lower(), value)
    if isinstance(value, bool):
        return float(value == flag.trains)
    if flag.is_factor:
        return check_weight(location, value)
    is_number = isinstance(value, int | float) and value in (0, 1)
    if is_number and not flag.is_boolean:
        return float((value == 1) == flag.trains)
    text = repr(value[:40]) if isinstance(value, str) else describe_value(value)
    if is_number:
        why = "write true (not trained) or false, since the number may mean either"
    else:
        why = "write true or false" if flag.is_boolean else "write true, false, 0 or 1"
    raise BadRecord("bad_value", f"{location} is {text}; {why}")
