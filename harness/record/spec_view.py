"""What a record needs from the copy of its spec: title, checks by id, and which cases a case id names.

Reads the text alone (no prompt or checkpoint has to exist), so a record can be checked on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from harness.errors import RecordError
from harness.spec.model import Attribution, Throughput

SMALLEST_EFFECT: float = Throughput.model_fields["smallest_effect"].default
MUST_PASS: tuple[str, ...] = Attribution.model_fields["must_pass"].default


@dataclass(frozen=True)
class CaseName:
    """A case id taken apart: `specs/x.yaml::check[axis:value+axis:value]`."""

    spec_path: str
    name: str
    check: str
    cell: dict[str, str]

    @classmethod
    def parse(cls, case_id: str) -> CaseName:
        """Take an id apart; an id without `::` or brackets has an empty path or cell."""
        spec_path, _, name = case_id.rpartition("::")
        check, bracket, inside = name.partition("[")
        pairs = [part.partition(":") for part in inside.removesuffix("]").split("+")] if bracket else []
        return cls(spec_path, name, check, {axis: value for axis, _, value in pairs})

    @property
    def flag_cell(self) -> str:
        """The cell without its stage: what is set in the child's environment; `default` when nothing is."""
        parts = [f"{axis}:{value}" for axis, value in self.cell.items() if axis != "stage"]
        return "+".join(parts) or "default"


@dataclass(frozen=True)
class SpecView:
    """The spec's text, parsed as far as a record needs."""

    name: str
    title: str
    block_size: int
    checks: dict[str, dict[str, Any]]
    states_block_size: bool = False  # the pair's own entry, not the default

    @classmethod
    def parse(cls, text: str) -> SpecView:
        """Parse the copy of a spec; RecordError when it is not one."""
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RecordError(f"the record's spec.yaml is not YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(data, dict) or not isinstance(data.get("checks"), list):
            raise RecordError("the record's spec.yaml is not a spec: no list of checks")
        checks = {str(check.get("id")): check for check in data["checks"] if isinstance(check, dict)}
        pair = data.get("pair")
        name = str(data.get("name", "unnamed"))
        return cls(
            name=name,
            title=str(data.get("title", name)),
            block_size=int(pair.get("block_size", 4)) if isinstance(pair, dict) else 4,
            checks=checks,
            states_block_size=isinstance(pair, dict) and "block_size" in pair,
        )

    def setting(self, check: str, key: str, default: Any) -> Any:
        """One field of one check; `default` when the spec does not write it."""
        value = self.checks.get(check, {}).get(key)
        return default if value is None else value

    def smallest_effect(self, check: str) -> float:
        """Smallest change of interest of a throughput check, as a share."""
        return float(self.setting(check, "smallest_effect", SMALLEST_EFFECT))

    def declared(self, case: CaseName, kind: str) -> bool:
        """Whether a `declined` outcome of this case is what the spec asks for."""
        if kind == "decline":
            return True
        must_pass = self.setting(case.check, "must_pass", MUST_PASS)
        return kind == "attribution" and case.cell.get("stage") not in must_pass

    def known_failure(self, check: str) -> str | None:
        """Reason of a check's `xfail`, if it has one."""
        xfail = self.checks.get(check, {}).get("xfail")
        return str(xfail.get("reason", "")) if isinstance(xfail, dict) else None
