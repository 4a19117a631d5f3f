"""Names of a message's keys and roles, as data sets of several libraries spell them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from penstock.prepare.formats.training_flags import FLAGS, Flag
from penstock.prepare.settings import DatasetSettings

CALL = "tool_call"
"""Role of a message whose content is tool calls of the assistant's, as JSON."""

# `developer` is a newer name of `system`; `function` and `ipython` are older names of `tool`. Most
# chat templates do not know them and silently skip such messages.
OPENAI_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}

ROLES = {
    **OPENAI_ROLES,
    "human": "user",
    **dict.fromkeys((f"{maker}gpt" for maker in ("", "chat")), "assistant"),
    **dict.fromkeys(("bing", "bard", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call", "tool_calls"), CALL),
}
"""Roles by the names in ShareGPT's data and in OpenAI's."""


@dataclass(frozen=True)
class MessageKeys:
    """The keys of messages, and their role names."""

    spellings: Sequence[tuple[str, str]]
    """(key of the role, key of the content)."""
    roles: Mapping[str, str]
    merges_calls: bool
    """Whether tool calls become part of the assistant message before them."""
    flags: Mapping[str, Flag] = field(default_factory=lambda: FLAGS)
    """Keys that say whether a message is trained."""
    trained_roles: Collection[str] = ("assistant",)
    """The roles of `roles_to_train`."""
    detail: str | None = None
    """Key that says which characters of a message are trained."""

    def of(self, message: Mapping[str, Any]) -> tuple[str, str]:
        """(key of the role, key of the content) of this message."""
        usual = self.spellings[0]
        if usual[0] in message and usual[1] in message:
            return usual
        roles = [role for role, _ in self.spellings]
        role = next((role for role in roles if role in message), roles[0])
        contents = [content for spelled_role, content in self.spellings if spelled_role == role]
        return role, next((content for content in contents if content in message), contents[0])


OPENAI = MessageKeys([("role", "content")], OPENAI_ROLES, merges_calls=False)
SHAREGPT = MessageKeys([("from", "value"), ("role", "content")], ROLES, merges_calls=True)


def message_keys(settings: DatasetSettings) -> MessageKeys:
    """The keys of the messages of a data set: those of its type, or as its settings name them.

    Where keys or roles are named, roles have ShareGPT's names too.
    """
    roles = settings.message_roles or {}
    return _message_keys(
        settings.type == "chat",
        settings.field_message_role,
        settings.field_message_content,
        tuple((name, target) for target, names in roles.items() for name in names),
        settings.field_message_training,
        settings.field_message_training_detail,
        settings.roles_to_train,
    )


# Asked for each record.
@lru_cache(maxsize=64)
def _message_keys(
    is_openai: bool,
    role: str | None,
    content: str | None,
    roles: tuple[tuple[str, str], ...],
    flag: str | None,
    detail: str | None,
    trained_roles: tuple[str, ...],
) -> MessageKeys:
    keys = OPENAI if is_openai else SHAREGPT
    keys = replace(keys, trained_roles=trained_roles, detail=detail)
    if role or content:
        keys = replace(keys, spellings=[(role or r, content or c) for r, c in keys.spellings])
    if role or content or roles:
        keys = replace(keys, roles={**ROLES, **dict(roles)}, merges_calls=True)
    return replace(keys, flags={flag: FLAGS.get(flag, Flag())}) if flag else keys
