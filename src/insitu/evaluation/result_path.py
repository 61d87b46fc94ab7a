"""The part of a workflow's answer that is its output, as `--result_json_path` names it."""

from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_jsonable_python

from insitu.errors import ConfigError, WorkflowError
from insitu.workflow.conversion import json_form

if TYPE_CHECKING:
    from jsonpath import JSONPath


class ResultPath:
    """A JSONPath (RFC 9535) that must name exactly one place of each answer."""

    def __init__(self, text: str, path: "JSONPath") -> None:
        self._text = text
        self._path = path

    @classmethod
    def parse(cls, text: str) -> "ResultPath | None":
        """None for `$`, the whole answer. Raises ConfigError for what is no JSONPath."""
        if text == "$":
            return None
        from jsonpath import JSONPathEnvironment, JSONPathError

        try:
            return cls(text, JSONPathEnvironment(strict=True).compile(text))  # type: ignore[arg-type]  # strict: no compound paths
        except JSONPathError as error:
            raise ConfigError(
                f"result_json_path {text!r} is no JSONPath, such as $.answer or $.choices[0].text: {error.args[0]}"
            ) from error

    def take(self, answer: Any) -> Any:
        """The one value at the path: of a model, a container, or JSON text. WorkflowError if there is not one."""
        if isinstance(answer, str | bytes):
            try:
                answer = from_json(answer)
            except ValueError as error:
                raise WorkflowError(f"result_json_path {self._text}: the answer {answer!r:.80} is no JSON") from error
        found = self._path.findall(to_jsonable_python(answer, fallback=json_form, bytes_mode="base64"))
        if len(found) != 1:
            raise WorkflowError(
                f"result_json_path {self._text} matches {len(found)} values of {answer!r:.200}, not one"
            )
        return found[0]
