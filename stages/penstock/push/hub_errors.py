"""Hugging Face Hub errors as user-facing errors. The client's exceptions are not chained: they
contain signed URLs, and a failed attempt's log contains every chained message."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

from penstock.core import env
from penstock.core.errors import CapabilityError, PenstockError, StageError
from penstock.core.process.retry import is_transient

_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")


@dataclass(frozen=True)
class HubRepo:
    """A Hub repository accessed with a token; `field` is the setting that names it."""

    api: HfApi
    repo: str
    field: str

    @classmethod
    def with_token(cls, repo: str, field: str, *, endpoint: str | None = None) -> "HubRepo":
        """Use the token of the environment or of a login. Raises CapabilityError if there is none.
        The token is only passed to the Hub client and not stored elsewhere."""
        token = env.hub_token() or get_token()
        if not token:
            raise CapabilityError(
                f"There is no Hugging Face token, and {repo} cannot be written without one.\n"
                "  Set HF_TOKEN to a token that may write, or log in once with `hf auth login`."
            )
        return cls(HfApi(endpoint=endpoint, token=token, library_name="penstock"), repo, field)

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Translate the client's exceptions in a block; `action` is a verb such as `send to`."""
        try:
            yield
        except PenstockError:
            raise
        except OfflineModeIsEnabled:
            raise CapabilityError(
                f"{self.repo} cannot be reached: HF_HUB_OFFLINE is set.\n"
                f"  Unset it to push, or leave {self.field} out."
            ) from None
        except (HTTPError, OSError, RuntimeError, ValueError) as error:
            raise self._to_penstock_error(action, error) from None

    def require_committed(self, missing: Sequence[str], num_files: int, commit: str) -> None:
        """Raise StageError if files of a commit that succeeded are missing in it."""
        if missing:
            raise StageError(
                f"{len(missing)} of {num_files} files are not in commit {commit} of {self.repo} "
                f"although the commit succeeded: {', '.join(missing[:5])}.\n"
                "  Look for them in the repository's .gitignore, then push again."
            )

    def _to_penstock_error(self, action: str, error: BaseException) -> PenstockError:
        status = http_status(error)
        text = str(error) if error.__cause__ is None else f"{error} {error.__cause__}"
        message = _QUERY.sub(r"\1", " ".join(text.split()))[:500]
        message = message.replace(str(self.api.token), "<token>")
        location = f"{self.repo} at {self.api.endpoint}"
        if status in (401, 403):
            return CapabilityError(
                f"The hub refuses to {action} {location} with this token "
                f"(HTTP {status}): {message}\n"
                f"  Use a token that may write to {self.repo} (HF_TOKEN or `hf auth login`), or "
                f"change {self.field}."
            )
        if status == 404:
            return CapabilityError(
                f"{location} does not exist, or this token may not see it (HTTP 404): {message}\n"
                f"  Check {self.field} and its revision, and which account the token belongs to."
            )
        fault = f"HTTP {status}" if status else type(error).__name__
        failure = StageError(
            f"Could not {action} {location} ({fault}): {message}\n"
            "  Push again: uploaded files are not sent twice."
        )
        failure.may_pass = is_transient(error)
        return failure


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status of an error; the client wraps errors of its upload threads."""
    while error is not None:
        if isinstance(error, HfHubHTTPError) and error.response is not None:
            return error.response.status_code
        error = error.__cause__
    return None
