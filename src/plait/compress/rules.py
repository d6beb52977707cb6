"""Which parameter travels in how many bits: rules by name, by pattern or by the kind of module.

The first rule that fits a parameter decides. Where none does, norms, biases and small tensors stay exact:
they are little of the traffic and much of the accuracy. All others get the bits that are asked for, but those
whose gradients cannot be compressed, which no rule changes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from plait.compress.given import WHOLE, expect
from plait.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

Bits = int | Literal["auto"]
"""1 to 8; 16 is fp16, 32 uncompressed; "auto" is chosen as training goes on."""

EXACT = 32


def checked_bits(bits: Bits, setting: str = "bits") -> Bits:
    """The bits, if they are any."""
    if not (isinstance(bits, str) and bits == "auto") and not _is_width(bits):
        raise UsageError(f"{setting} is {bits!r}", setting=setting, works='1 to 8, 16, 32 or "auto"')
    return bits


def checked_width(bits: object, setting: str = "bits") -> int:
    """The bits, if they are any that need not be chosen."""
    if not _is_width(bits):
        raise UsageError(f"{setting} is {bits!r}", setting=setting, works="1 to 8, 16, 32")
    return int(bits)  # type: ignore[call-overload, no-any-return]


def _is_width(bits: object) -> bool:
    return isinstance(bits, WHOLE) and not isinstance(bits, bool) and int(bits) in (*range(1, 9), 16, EXACT)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Bits for the parameters that fit all that is given."""

    bits: Bits
    name: str | None = None
    """The parameter's whole name."""
    pattern: str | None = None
    """A regular expression that is found somewhere in the name."""
    module: str | type | None = None
    """The class of the module that holds it, or the name of one; subclasses fit too."""

    def __post_init__(self) -> None:
        checked_bits(self.bits)
        expect(self.name, str, None, setting="name", works='"head.weight"')
        expect(self.pattern, str, None, setting="pattern", works='"head"')
        expect(self.module, str, type, None, setting="module", works='"Linear", or nn.Linear')
        if self.name is None and self.pattern is None and self.module is None:
            raise UsageError("a rule for no parameters", setting="rules", works='pattern="." fits all')
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise UsageError(
                    f"{self.pattern!r} is no regular expression: {error}",
                    setting="pattern",
                    works=repr(re.escape(self.pattern)),
                ) from None

    def fits(self, parameter: Parameter) -> bool:
        """Whether it is for this parameter."""
        kind = self.module.__name__ if isinstance(self.module, type) else self.module
        return (
            (self.name is None or self.name == parameter.name)
            and (self.pattern is None or re.search(self.pattern, parameter.name) is not None)
            and (kind is None or kind in parameter.kinds)
        )

    def __str__(self) -> str:
        kind = self.module.__name__ if isinstance(self.module, type) else self.module
        given = (("name", self.name), ("pattern", self.pattern), ("module", kind))
        return ", ".join(f"{what} {value!r}" for what, value in given if value is not None)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter as rules see it."""

    name: str
    shape: tuple[int, ...]
    kinds: tuple[str, ...] = ()
    """The names of the class of its module and of that one's base classes."""
    left: str | None = None
    """Why its gradient is left to torch, where it is."""

    @property
    def count(self) -> int:
        """Elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, kw_only=True)
class Selected:
    """A parameter, its bits, and why."""

    parameter: Parameter
    bits: Bits
    why: str


def select(
    parameters: Sequence[Parameter], bits: Bits, rules: Sequence[Rule] = (), *, smallest: int = 1024
) -> tuple[Selected, ...]:
    """The bits of every parameter; a rule that fits none is an error, for it is a mistake."""
    checked_bits(bits)
    for rule in rules:
        if not any(rule.fits(parameter) for parameter in parameters):
            raise UsageError(
                f"no parameter fits the rule with {rule}", setting="rules", works=_near(rule, parameters)
            )
    return tuple(_select(parameter, bits, rules, smallest) for parameter in parameters)


def _select(parameter: Parameter, bits: Bits, rules: Sequence[Rule], smallest: int) -> Selected:
    if parameter.left is not None:
        return Selected(parameter=parameter, bits=EXACT, why=parameter.left)
    rule = next((rule for rule in rules if rule.fits(parameter)), None)
    if rule is not None:
        return Selected(parameter=parameter, bits=rule.bits, why=f"rule with {rule}")
    why = None
    if any("Norm" in kind for kind in parameter.kinds):
        why = "of a norm"
    elif len(parameter.shape) < 2:
        why = "a bias, or a vector like one"
    elif parameter.count < smallest:
        why = f"fewer than {smallest} elements"
    if why is not None:
        return Selected(parameter=parameter, bits=EXACT, why=why)
    return Selected(parameter=parameter, bits=bits, why="as asked for")


def _near(rule: Rule, parameters: Sequence[Parameter]) -> str:
    if not parameters:
        return "a model with trainable parameters"
    names = [parameter.name for parameter in parameters]
    if rule.name is not None:
        return repr((difflib.get_close_matches(rule.name, names, n=1, cutoff=0) or names)[0])
    if rule.module is not None:
        kinds = sorted({parameter.kinds[0] for parameter in parameters if parameter.kinds})
        return ", ".join(kinds) or "a class of a module that has parameters"
    return f"a part of a name such as {names[0]!r}"


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, each once, without what torch.compile puts before a name."""
    named = ((plain_name(name), parameter) for name, parameter in model.named_parameters())
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def described(model: nn.Module) -> tuple[Parameter, ...]:
    """The trainable parameters as rules see them."""
    owners = {
        plain_name(f"{path}.{name}" if path else name): module
        for path, module in model.named_modules(remove_duplicate=False)
        for name, _ in module.named_parameters(recurse=False)
    }
    return tuple(
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            kinds=tuple(_kinds(type(owners[name]))),
            left=_left(owners[name], parameter),
        )
        for name, parameter in parameters_of(model).items()
    )


def _left(module: nn.Module, parameter: nn.Parameter) -> str | None:
    import torch

    if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"of {parameter.dtype}"
    # What DDP goes by, too.
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
        return "its gradients are sparse"
    return None


def _kinds(kind: type) -> Iterable[str]:
    from torch import nn

    return (base.__name__ for base in kind.__mro__ if base not in (object, nn.Module))


def plain_name(name: str) -> str:
    """A name without what torch.compile puts before it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
