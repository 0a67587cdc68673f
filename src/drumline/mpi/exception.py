"""MPI's exception: an error code for programs and a message for people."""

from __future__ import annotations

from . import constants as C

_NAMES = {value: name for name, value in vars(C).items() if name == "SUCCESS" or name.startswith("ERR_")}


class MPIError(RuntimeError):
    """An error with MPI's error class; `drumline.MPI.Exception`."""

    def __init__(self, code: int = C.SUCCESS, what: str = "", *, rule: str = "", fix: str = "") -> None:
        super().__init__(code, what, rule, fix)
        self.what, self.rule, self.fix = what, rule, fix
        self._code = int(code) if int(code) in _NAMES else C.ERR_UNKNOWN

    def __int__(self) -> int:
        return self._code

    def __bool__(self) -> bool:
        return self._code != C.SUCCESS

    def __hash__(self) -> int:
        return hash(self._code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | MPIError) and int(other) == self._code

    def __lt__(self, other: int) -> bool:
        return self._code < int(other)

    def __le__(self, other: int) -> bool:
        return self._code <= int(other)

    def __gt__(self, other: int) -> bool:
        return self._code > int(other)

    def __ge__(self, other: int) -> bool:
        return self._code >= int(other)

    def __repr__(self) -> str:
        return f"MPI.Exception({self._code})"

    def __str__(self) -> str:
        lines = [f"{self.Get_error_string()}: {self.what}" if self.what else self.Get_error_string()]
        lines += [f"  {label + ':':<6} {text}" for label, text in (("rule", self.rule), ("try", self.fix)) if text]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self._code, self.what, self.rule, self.fix))

    def Get_error_code(self) -> int:
        """The error code."""
        return self._code

    def Get_error_class(self) -> int:
        """The error class: here the same as the code."""
        return self._code

    def Get_error_string(self) -> str:
        """The name of the error code."""
        return Get_error_string(self._code)

    error_code = property(Get_error_code, doc="The error code.")
    error_class = property(Get_error_class, doc="The error class.")
    error_string = property(Get_error_string, doc="The name of the error code.")


def _rebuild(code: int, what: str, rule: str, fix: str) -> MPIError:
    return MPIError(code, what, rule=rule, fix=fix)


def Get_error_class(errorcode: int) -> int:
    """The error class of an error code."""
    if errorcode not in _NAMES:
        raise MPIError(C.ERR_ARG, f"error code {errorcode}", rule=f"0 <= code <= {C.ERR_LASTCODE}")
    return errorcode


def Get_error_string(errorcode: int) -> str:
    """The name of an error code."""
    return f"MPI_{_NAMES[Get_error_class(errorcode)]}"
