"""The command line: `list`, `check`, `run`, `try`, `report`, `compare`, `counters`, `power`, `schema`, `env`, `new`.

One module per verb; what is heavy is imported inside a verb, so that `list` and `check` stay fast.
Exit codes: 0 no case failed, 1 a case failed, 2 usage or bad spec, 3 could not measure.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from harness.cli.compare import compare
from harness.cli.counters import counters
from harness.cli.env import env
from harness.cli.inspect import check, list_specs
from harness.cli.new import new
from harness.cli.power import power
from harness.cli.report import report
from harness.cli.run import run
from harness.cli.schema import schema
from harness.cli.trial import try_spec
from harness.errors import HarnessError

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show the whole traceback of an internal error.")
def cli(traceback: bool) -> None:
    """Hold multi-token prediction to byte-identical text and a real speed-up, one YAML spec at a time."""


for command in (list_specs, check, run, try_spec, report, compare, counters, power, schema, env, new):
    cli.add_command(command)


def run_cli(arguments: Sequence[str]) -> int:
    """Run one command line; every error becomes one message on stderr and an exit code."""
    try:
        result = cli.main(args=list(arguments), prog_name="harness", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except HarnessError as error:
        click.echo(str(error) or type(error).__name__, err=True)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        if "--traceback" in arguments:
            click.echo(traceback.format_exc(), err=True)
        else:
            first = (str(error).splitlines() or [""])[0]
            text = f"internal error: {type(error).__name__}: {first}" if first else f"internal error: {error!r}"
            click.echo(f"{text} (run `harness --traceback ...` to see where)", err=True)
        return HarnessError.exit_code


def main() -> NoReturn:
    """Entry point of the console script and of `python -m harness`."""
    sys.exit(run_cli(sys.argv[1:]))
