"""How a model's gradients are compressed: what is asked for, before any model is seen."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from plait.compress.adapt import Adaptation, Log
from plait.compress.codec import Cast, Codec, Exact, Quantizer
from plait.compress.given import expect
from plait.compress.rules import EXACT, Bits, Rule, checked_bits, checked_width
from plait.compress.settings import Settings
from plait.compress.wire import checked_bucket
from plait.errors import UsageError
from plait.units import parse_whole

NEEDS_FEEDBACK = 4
"""Fewer bits than this have error feedback unless it is switched off."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """The same on all workers."""

    bits: Bits = 4
    """1 to 8; 16 is fp16, 32 uncompressed; "auto" chooses for each layer as training goes on."""
    rules: tuple[Rule, ...] = ()
    """Other bits for some parameters; the first rule that fits decides."""
    codec: Codec | None = None
    """In place of quantization to ``bits``, for parameters that have these: ``TopK()``, ``LowRank()``."""
    bucket: int = 128
    """Elements that share a grid: fewer are more accurate, and each grid costs 8 bytes."""
    stochastic: bool = True
    """Round at random, so that the mean is right; else to the nearest."""
    smallest: int = 1024
    """Tensors with fewer elements stay exact, where no rule says otherwise."""
    error_feedback: bool | None = None
    """Whether what rounding loses is added the next time; None: below 4 bits, and with "auto"."""
    feedback_bits: Literal[8, 32] = 32
    """How error feedback is held between steps: 4 bytes an element, or 1."""
    gather_bits: int | None = None
    """For FSDP2: the bits of weights when they are gathered; None leaves that to torch."""
    seed: int = 0
    """Of the rounding."""
    decline: bool = True
    """Leave gradients uncompressed where, as measured, that is faster."""
    adaptation: Adaptation = field(default_factory=Adaptation)
    """How "auto" chooses."""
    replay: Log | str | Path | None = None
    """Decisions of an earlier run to repeat, in place of choosing; a file is read at once."""
    settings: Settings = field(default_factory=Settings)
    """How the collectives run."""

    def __post_init__(self) -> None:
        checked_bits(self.bits)
        object.__setattr__(self, "rules", _rules(self.rules))
        if self.codec is not None:
            checked_codec(self.codec)
            if self.bits == "auto":
                raise UsageError(
                    f"the codec {self.codec!r} for bits that are {self.bits!r}",
                    setting="codec",
                    works='codec=None, or bits other than "auto"',
                )
        for name in ("stochastic", "decline"):
            expect(getattr(self, name), bool, setting=name, works="True or False")
        expect(self.error_feedback, bool, None, setting="error_feedback", works="True, False or None")
        expect(self.adaptation, Adaptation, setting="adaptation", works="Adaptation(alpha=1.0)")
        expect(self.settings, Settings, setting="settings", works="Settings(timeout_s=60)")
        checked_bucket(self.bucket)
        parse_whole(self.smallest, setting="smallest", least=0)
        parse_whole(self.seed, setting="seed", least=0)
        if not isinstance(self.feedback_bits, int) or self.feedback_bits not in (8, 32):
            raise UsageError(
                f"feedback in {self.feedback_bits} bits", setting="feedback_bits", works="8 or 32"
            )
        if self.gather_bits is not None:
            checked_width(self.gather_bits, "gather_bits")
        expect(self.replay, Log, str, Path, None, setting="replay", works='"bits.json"')
        if isinstance(self.replay, (str, Path)):
            object.__setattr__(self, "replay", Log.load(self.replay))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Compression:
        """From keywords; an unknown one is an error that names the nearest."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise UsageError(
                    f"compression has no {name!r}", setting=name, works=f"{near}, or {', '.join(known)}"
                )
        return cls(**given)

    def codec_at(self, bits: int) -> Codec:
        """What a gradient travels in at a width."""
        if bits == EXACT:
            return Exact()
        if bits == self.bits and self.codec is not None:
            return self.codec
        if bits == 16:
            return Cast("fp16")
        return Quantizer(bits=bits, bucket=self.bucket, stochastic=self.stochastic)

    def feeds_back(self, bits: Iterable[Bits]) -> bool:
        """Whether there is error feedback, with parameters of these bits."""
        asked = list(bits)
        if self.error_feedback is not None:
            return self.error_feedback and any(each not in (EXACT,) for each in asked)
        unbiased = getattr(self.codec, "unbiased", True)
        return any(
            each == "auto" or each < NEEDS_FEEDBACK or (each == self.bits and not unbiased) for each in asked
        )

    def facts(self) -> dict[str, str]:
        """What all workers must have alike, by the name of the setting."""
        found = {each.name: repr(getattr(self, each.name)) for each in fields(self)}
        if isinstance(self.replay, Log):
            decisions = json.dumps(self.replay.to_json(), sort_keys=True)
            digest = hashlib.blake2b(decisions.encode(), digest_size=8).hexdigest()
            found["replay"] = f"of {len(self.replay.decisions)} decisions, digest {digest}"
        return found


def checked_codec(codec: object) -> Codec:
    """The codec, if it is one."""
    if isinstance(codec, type):  # which has all the methods, and none of the fields
        raise UsageError(
            f"the codec is the class {codec.__name__}", setting="codec", works=f"{codec.__name__}()"
        )
    if not isinstance(codec, Codec):
        raise UsageError(f"{codec!r} is no codec", setting="codec", works="plait.compress.TopK()")
    return codec


def _rules(given: object) -> tuple[Rule, ...]:
    """One rule, or several."""
    several = isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping))
    rules: tuple[Any, ...] = tuple(given) if several else (given,)  # type: ignore[arg-type]
    for rule in rules:
        if not isinstance(rule, Rule):
            raise UsageError(f"{rule!r} is no rule", setting="rules", works='[Rule(pattern="head", bits=8)]')
    return rules
