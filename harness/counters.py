"""The algebra of drafting counters: what must hold between them, whoever counted. Pure, standard library alone.

Held against our own raw lines when a case is judged and when its record is read, and by `harness counters` against
what vLLM, SGLang and llama.cpp print. An identity is skipped where the source does not say what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

ROUNDING = 1e-9  # relative; what a float loses between two programs


@dataclass(frozen=True)
class Stated:
    """A figure as a program printed it: the true one lies within `half`, half a unit of its last place."""

    value: float
    half: float = 0.0

    @classmethod
    def parse(cls, text: str, scale: float = 1.0) -> Stated:
        """The figure and its resolution from its digits; `scale` 0.01 for per cent. ValueError for no number."""
        value = float(text)
        mantissa, _, exponent = text.lower().partition("e")
        places = len(mantissa.partition(".")[2])
        last = max(-300, min(300, int(exponent or 0) - places))
        return cls(value * scale, 0.5 * 10.0**last * scale)

    def agrees(self, other: float) -> bool:
        """Whether it can be the printed form of another figure."""
        return abs(self.value - other) <= self.half * (1 + 1e-6) + ROUNDING * max(1.0, abs(other))


@dataclass(frozen=True)
class Counters:
    """Counts of one source over one span; None or empty where it does not say.

    `accepted_at` counts rounds that accepted draft i, `rates_at` is the same as shares. `emitted` counts every token of
    the output, `prefilled` of them before the first round; the last round may lose up to `cut_limit`.
    """

    source: str
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_at: tuple[int, ...] | None = None
    max_drafts: int | None = None  # drafts that a round may offer
    whole_blocks: bool = False  # and always does
    emitted: int | None = None
    prefilled: int = 1
    cut_limit: int | None = None
    histogram_rounds: int | None = None  # rounds that a histogram of accepted drafts counts
    rounds_that_accepted: int | None = None  # at least one draft
    acceptance_rate: Stated | None = None
    acceptance_length: Stated | None = None
    emitted_per_round: Stated | None = None
    rates_at: tuple[Stated, ...] = ()


@dataclass(frozen=True)
class Violation:
    """A broken identity, both sides in words."""

    identity: str
    text: str

    def __str__(self) -> str:
        return f"{self.identity}: {self.text}"


@dataclass(frozen=True)
class Identity:
    """One rule. `check` gives None where it does not apply, no text where it holds, else what stands against what."""

    name: str
    check: Callable[[Counters], str | None]


def _counts(c: Counters) -> str | None:
    named = {"rounds": c.rounds, "drafted": c.drafted, "accepted": c.accepted, "emitted": c.emitted}
    known = {name: value for name, value in named.items() if value is not None}
    known |= {f"accepted at draft {at}": count for at, count in enumerate(c.accepted_at or (), start=1)}
    bad = [f"{name} {value}" for name, value in known.items() if value < 0]
    return ", ".join(bad) if known else None


def _rejected(c: Counters) -> str | None:
    if c.accepted is None or c.drafted is None:
        return None
    return "" if c.accepted <= c.drafted else f"accepted {c.accepted} of {c.drafted} drafts"


def _offered(c: Counters) -> str | None:
    if c.drafted is None or c.rounds is None or c.max_drafts is None:
        return None
    most = c.rounds * c.max_drafts
    if c.drafted > most or (c.whole_blocks and c.drafted != most):
        return f"{c.drafted} drafts over {c.rounds} rounds of {c.max_drafts}, which makes {most}"
    return ""


def _positions_sum(c: Counters) -> str | None:
    if c.accepted_at is None or c.accepted is None:
        return None
    total = sum(c.accepted_at)
    return "" if total == c.accepted else f"positions {list(c.accepted_at)} make {total}, {c.accepted} were accepted"


def _positions_fall(c: Counters) -> str | None:
    values: Sequence[float] = c.accepted_at if c.accepted_at is not None else [rate.value for rate in c.rates_at]
    if not values:
        return None
    rise = next((at for at in range(1, len(values)) if values[at] > values[at - 1]), None)
    return "" if rise is None else f"draft {rise + 1} at {values[rise]:g} after draft {rise} at {values[rise - 1]:g}"


def _first_position(c: Counters) -> str | None:
    if not c.accepted_at or c.rounds is None:
        return None
    first = c.accepted_at[0]
    return "" if first <= c.rounds else f"draft 1 accepted in {first} of {c.rounds} rounds"


def _histogram(c: Counters) -> str | None:
    if c.histogram_rounds is None or c.rounds is None:
        return None
    return "" if c.histogram_rounds == c.rounds else f"{c.histogram_rounds} in the histogram, {c.rounds} rounds"


def _accepting(c: Counters) -> str | None:
    """Rounds that accepted a draft lie between what a round can accept at most and the accepted drafts."""
    count = c.rounds_that_accepted
    if count is None:
        return None
    if c.rounds is not None and count > c.rounds:
        return f"{count} of {c.rounds} rounds"
    if c.rates_at and c.rounds and not c.rates_at[0].agrees(count / c.rounds):
        return f"{count} / {c.rounds} = {count / c.rounds:.6g} against {c.rates_at[0].value:.6g} at draft 1"
    if c.accepted is not None and count > c.accepted:
        return f"{count} rounds with {c.accepted} accepted drafts"
    return ""


def _rate(c: Counters) -> str | None:
    if c.acceptance_rate is None or c.accepted is None or not c.drafted:
        return None
    counted = c.accepted / c.drafted
    if c.acceptance_rate.agrees(counted):
        return ""
    return f"{c.acceptance_rate.value:.6g} against {c.accepted} / {c.drafted} = {counted:.6g}"


def _length(c: Counters) -> str | None:
    if c.acceptance_length is None or c.accepted is None or not c.rounds:
        return None
    counted = 1 + c.accepted / c.rounds
    if c.acceptance_length.agrees(counted):
        return ""
    return f"{c.acceptance_length.value:.6g} against 1 + {c.accepted} / {c.rounds} = {counted:.6g}"


def _length_from_positions(c: Counters) -> str | None:
    if c.acceptance_length is None or not c.rates_at:
        return None
    summed = 1 + sum(rate.value for rate in c.rates_at)
    room = c.acceptance_length.half + sum(rate.half for rate in c.rates_at)
    if Stated(c.acceptance_length.value, room).agrees(summed):
        return ""
    return f"{c.acceptance_length.value:.6g} against {summed:.6g} from {len(c.rates_at)} positions"


def _rates_at(c: Counters) -> str | None:
    if not c.rates_at or c.accepted_at is None or not c.rounds:
        return None
    for at, (rate, count) in enumerate(zip(c.rates_at, c.accepted_at, strict=False), start=1):
        if not rate.agrees(count / c.rounds):
            return f"draft {at} at {rate.value:.6g} against {count} / {c.rounds} = {count / c.rounds:.6g}"
    if len(c.rates_at) != len(c.accepted_at):
        return f"{len(c.rates_at)} shares for {len(c.accepted_at)} positions"
    return ""


def _bounds(c: Counters) -> str | None:
    shares = [*c.rates_at, *([c.acceptance_rate] if c.acceptance_rate is not None else [])]
    if not shares and c.acceptance_length is None:
        return None
    bad = [f"share {one.value:g}" for one in shares if not -one.half <= one.value <= 1 + one.half]
    length = c.acceptance_length
    if length is not None:
        most = float("inf") if c.max_drafts is None else 1 + c.max_drafts
        if not 1 - length.half <= length.value <= most + length.half:
            bad.append(f"acceptance length {length.value:g}" + (f" with {c.max_drafts} drafts" if c.max_drafts else ""))
    return ", ".join(bad)


def _length_and_rate(c: Counters) -> str | None:
    """With K drafts in every round the length is 1 + K times the rate, so K follows and must be a whole number."""
    length, rate = c.acceptance_length, c.acceptance_rate
    if length is None or rate is None or c.max_drafts is None or not c.whole_blocks:
        return None
    predicted = 1 + c.max_drafts * rate.value
    room = length.half + c.max_drafts * rate.half
    if Stated(length.value, room).agrees(predicted):
        return ""
    return f"{length.value:.6g} against 1 + {c.max_drafts} x {rate.value:.6g} = {predicted:.6g}"


def _emitted(c: Counters) -> str | None:
    if c.emitted is None or c.accepted is None:
        return None
    if not c.rounds or c.cut_limit is None:
        most = c.accepted <= c.emitted
        return "" if most else f"{c.emitted} tokens hold fewer than the {c.accepted} accepted drafts"
    produced = c.prefilled + c.rounds + c.accepted
    least = produced - c.cut_limit
    if least <= c.emitted <= produced:
        return ""
    span = f"{least}..{produced}" if c.cut_limit else str(produced)
    return f"{c.emitted} tokens, but prefill and {c.rounds} rounds account for {span}"


def _emitted_per_round(c: Counters) -> str | None:
    if c.emitted_per_round is None or c.emitted is None or not c.rounds:
        return None
    counted = c.emitted / c.rounds
    if c.emitted_per_round.agrees(counted):
        return ""
    return f"{c.emitted_per_round.value:.6g} against {c.emitted} / {c.rounds} = {counted:.6g}"


IDENTITIES = (
    Identity("counts >= 0", _counts),
    Identity("drafted = accepted + rejected", _rejected),
    Identity("drafted <= rounds x drafts per round", _offered),
    Identity("sum of accepted_at = accepted", _positions_sum),
    Identity("accepted_at never rises", _positions_fall),
    Identity("accepted_at[1] <= rounds", _first_position),
    Identity("rounds = sum of the histogram", _histogram),
    Identity("rounds that accepted = accepted_at[1]", _accepting),
    Identity("acceptance_rate = accepted / drafted", _rate),
    Identity("acceptance_length = 1 + accepted / rounds", _length),
    Identity("acceptance_length = 1 + sum of accepted_at", _length_from_positions),
    Identity("accepted_at = accepted per position / rounds", _rates_at),
    Identity("0 <= acceptance_rate <= 1 <= acceptance_length", _bounds),
    Identity("acceptance_length = 1 + drafts per round x acceptance_rate", _length_and_rate),
    Identity("emitted = prefill + rounds + accepted - cut", _emitted),
    Identity("tokens per verify = emitted / rounds", _emitted_per_round),
)


def violations(counters: Counters) -> tuple[Violation, ...]:
    """Every identity that these counters break."""
    found = ((identity.name, identity.check(counters)) for identity in IDENTITIES)
    return tuple(Violation(name, text) for name, text in found if text)


def applicable(counters: Counters) -> int:
    """How many identities these counters say enough for."""
    return sum(identity.check(counters) is not None for identity in IDENTITIES)


# ---- our own generations --------------------------------------------------------------------------------------------


def generation_violations(
    accepted: Sequence[int], drafted: Sequence[int], *, tokens: int | None = None, block_size: int | None = None
) -> Iterator[Violation]:
    """What is broken in one generation's counts round by round, then in their sums.

    `tokens` counts the whole generation: one from prefill, then 1 + accepted for each round, of which the last round
    may be cut by a stop token or by the limit, by at most its accepted drafts.
    """
    if len(accepted) != len(drafted):
        text = f"{len(accepted)} rounds of accepted counts against {len(drafted)} rounds of drafted counts"
        yield Violation("one count per round", text)
        return
    for number, (got, offered) in enumerate(zip(accepted, drafted, strict=True)):
        if not 0 <= got <= offered:
            text = f"round {number} accepted {got} of {offered} drafts"
            yield Violation("drafted = accepted + rejected", text)
            return
    if block_size is not None and any(offered > block_size - 1 for offered in drafted):
        text = f"a round drafted {max(drafted)} tokens; block size {block_size} allows {block_size - 1}"
        yield Violation("drafted <= rounds x drafts per round", text)
    yield from violations(of_rounds("", accepted, drafted, tokens=tokens, block_size=block_size))


def of_rounds(
    source: str,
    accepted: Sequence[int],
    drafted: Sequence[int],
    *,
    tokens: int | None = None,
    block_size: int | None = None,
) -> Counters:
    """The counters of one generation of ours."""
    return Counters(
        source,
        rounds=len(accepted),
        drafted=sum(drafted),
        accepted=sum(accepted),
        accepted_at=tuple(sum(got > at for got in accepted) for at in range(max(drafted, default=0))),
        max_drafts=None if block_size is None else block_size - 1,
        emitted=tokens if accepted else None,
        cut_limit=accepted[-1] if accepted else None,
    )
