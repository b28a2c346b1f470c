"""Documents with a type: one writer and one reader for each, and one line for what is damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ncclops.errors import UsageError
from ncclops.record.documents import encode, load, write_whole

Record = TypeVar("Record")


def load_object(path: Path, advice: str) -> dict[str, Any] | None:
    """The JSON object in ``path``; None if there is no such file.

    Raises ``UsageError`` if it cannot be read or holds none; ``advice`` says what to do then.
    """
    try:
        document = load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; check its mode") from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}): {advice}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is damaged (it holds no JSON object): {advice}")
    return document


@dataclass(frozen=True)
class DocumentKind(Generic[Record]):
    """One kind of document: the ``schema`` that it names, its ``type``, and ``advice``.

    ``advice`` is what to do where one is damaged. Unknown fields are no fault: a later version has
    added them. Any thread.
    """

    schema: str
    type: type[Record]
    advice: str

    def parse(self, document: object, path: Path) -> Record:
        """``document``, which was read from ``path``, as its type.

        Raises ``UsageError`` if it is another kind of document, or a field has the wrong type.
        """
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != self.schema:
            named = isinstance(schema, str) and schema.isprintable()
            found = schema if named else "a document without a schema"
            raise UsageError(f"{path} is {found}, not {self.schema}: {self.advice}")
        try:
            return msgspec.convert(document, self.type)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is damaged ({error}): {self.advice}") from error

    def read(self, path: Path) -> Record | None:
        """What ``path`` holds; None if there is no such file.

        Raises ``UsageError`` for a file that cannot be read, is cut, or holds something else.
        """
        document = load_object(path, self.advice)
        return None if document is None else self.parse(document, path)

    def to_json(self, record: Record) -> dict[str, Any]:
        """``record`` as in the file, with the schema in front."""
        return {"schema": self.schema, **msgspec.to_builtins(record)}

    def encode(self, record: Record) -> bytes:
        """The text of its file."""
        return encode(self.to_json(record), indent=2)

    def write(self, path: Path, record: Record) -> None:
        """Write it, whole or not at all. Raises ``OSError``."""
        write_whole(path, self.encode(record))
