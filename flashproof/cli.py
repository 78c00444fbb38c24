"""The command `flashproof`.

This module imports PyTorch only for a verification. So help, `list` and `report` start at once.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

USAGE_ERROR = 4  # pytest's exit status for an error on the command line


class Status(SystemExit):
    """The exit status of a command. Errors that Typer finds on the command line have another exception."""


class Commands(TyperGroup):
    """The commands. `flashproof TARGET` is short for `flashproof verify TARGET`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts `verify` before arguments that do not begin with the name of a command."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h", "--version"):
            args = ["verify", *args]
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **keywords: Any) -> Any:
        """Ends with the status of pytest for an error on the command line."""
        try:
            return super().main(*args, **keywords)
        except Status:
            raise
        except SystemExit as end:
            raise SystemExit(USAGE_ERROR if end.code == 2 else end.code) from end


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    subcommand_metavar="TARGET... | COMMAND [ARGUMENTS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Target = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET...", help="package.module:attribute, path/file.py:attribute, or a name or glob of the catalogue"
    ),
]
Dtype = Annotated[
    list[str] | None, typer.Option("--dtype", help="only this dtype: float32, float16 or bfloat16; repeatable")
]
Device = Annotated[str | None, typer.Option("--device", help="only on this device: cpu or cuda")]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit", metavar="SECONDS", help="the limit for one forward of an external kernel, and for one backward"
    ),
]
Processes = Annotated[
    str,
    typer.Option(
        "-n", "--processes", metavar="NUMBER", help="the number of processes; with 0, everything runs in this process"
    ),
]
Require = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="FEATURES",
        help="fail unless these were verified: backward, causal, dropout, float16 ...; separate them by commas",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="fail if something could not be verified, and say what")]
Records = Annotated[
    Path | None,
    typer.Option("--records", metavar="FILE", help="write the records to this file; no report is written then"),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="DIR", help="write the report to this folder, instead of flashproof-report"),
]
JUnit = Annotated[
    Path | None, typer.Option("--junitxml", metavar="FILE", help="also write the result of each check as JUnit XML")
]


def _version(asked: bool) -> None:
    if asked:
        import flashproof

        typer.echo(f"flashproof {flashproof.__version__}")
        raise typer.Exit


@app.callback()
def flashproof(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Verify attention kernels: is a kernel as accurate as the arithmetic that it claims allows?

    [bold]flashproof mine.py:attention[/] verifies a function. It is short for [bold]flashproof verify[/], and
    [bold]flashproof verify --help[/] lists its options. With [bold]--quick[/] it answers within seconds.
    """


@app.command()
def verify(
    targets: Target,
    dtype: Dtype = None,
    device: Device = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", metavar="LINE", help="only this case (the line of a failure), by every check; repeatable"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a few checks and cases that find most faults within seconds")
    ] = False,
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="also the cases that all triples of levels need; takes many times as long"),
    ] = False,
    search: Annotated[
        str | None,
        typer.Option(
            "--search", metavar="BUDGET", help="how much each search tries: cases (5000) or time (30s, 10m, 8h)"
        ),
    ] = None,
    keyword: Annotated[
        str | None, typer.Option("-k", metavar="EXPRESSION", help="only checks whose names match, as for pytest -k")
    ] = None,
    require: Require = None,
    strict: Strict = False,
    time_limit: TimeLimit = None,
    processes: Processes = "auto",
    records: Records = None,
    report: Report = None,
    junitxml: JUnit = None,
) -> None:
    """Verify implementations. The exit status is 0 only if every one of them was verified."""
    _run(
        False,
        targets=tuple(targets),
        dtypes=tuple(dtype or ()),
        device=device,
        cases=tuple(case or ()),
        quick=quick,
        thorough=thorough,
        search=search,
        keyword=keyword,
        require=tuple(require or ()),
        strict=strict,
        time_limit=time_limit,
        processes=processes,
        records=records,
        report=report,
        junitxml=junitxml,
    )


@app.command()
def case(
    line: Annotated[str, typer.Argument(metavar="'LINE'", help="a case: the line of a failure")],
    targets: Target,
    device: Device = None,
    time_limit: TimeLimit = None,
    processes: Processes = "auto",
    records: Records = None,
    report: Report = None,
) -> None:
    """Run one case by every check that takes it, and show the verdict on each tensor, also where it passes."""
    _run(
        True,
        targets=tuple(targets),
        cases=(line,),
        device=device,
        time_limit=time_limit,
        processes=processes,
        records=records,
        report=report,
    )


@app.command("list")
def list_(
    checks: Annotated[
        bool, typer.Option("--checks", help="list the checks, each with what it asks of a kernel; takes longer")
    ] = False,
) -> None:
    """List the implementations of the catalogue, and which of them can run on this machine."""
    from flashproof import listing

    listing.show_checks() if checks else listing.show_catalogue()


@app.command()
def report(
    records: Annotated[
        list[Path],
        typer.Argument(metavar="RECORDS...", help="record files of runs, or folders of them; .gz is unpacked"),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="the folder; DIR/index.html is its first page")
    ],
) -> None:
    """Merge the records of several runs or machines into one report."""
    from flashproof.reports.__main__ import merge

    raise Status(_of_reports(merge(records, output, "flashproof report")))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="the records of the first run: a file or a folder")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="the records of the second run")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="also write the difference as DIR/difference.html"),
    ] = None,
) -> None:
    """Say what two runs judged differently. The exit status is 1 if a verdict became worse or is missing."""
    from flashproof.reports.difference import tell

    raise Status(_of_reports(tell(before, after, output)))


@app.command()
def bundle(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORDS...", help="record files of runs, or folders of them")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="the bundle; it is packed if the name ends in .gz")
    ],
) -> None:
    """Pack the records of runs into one file, in which any later change is found."""
    from flashproof.reports.bundle import tell

    raise Status(_of_reports(tell(records, output)))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="BUNDLE", help="the records of a run, as it wrote them or packed")],
    sample: Annotated[
        str, typer.Option("--sample", metavar="N", help="how many certified figures are computed again, or all")
    ] = "200",
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="chooses the sample; by default it is another each time")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="refuse a run that is not whole")] = False,
) -> None:
    """Check a run without its kernel: that no line was changed, that no case is missing, that figures are right.

    The exit status is 1 if the bundle is refused.
    """
    if sample != "all" and not sample.isdecimal():
        typer.echo(f"ERROR: --sample: {sample!r} is not a number; give 0, 1, 2 ... or all", err=True)
        raise Status(USAGE_ERROR)
    from flashproof.checking import tell

    raise Status(tell(file, sample, seed, must_be_whole=whole))


@app.command()
def history(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORDS...", help="record files of runs, or folders of them")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="the history, a JSON file; it is made if missing")
    ],
    gate: Annotated[
        bool, typer.Option("--gate", help="end with 1, and leave a run out, if it is worse than the last one")
    ] = False,
    rise: Annotated[
        float, typer.Option("--rise", metavar="SHARE", help="how far a rho may rise, as a share of the bound")
    ] = 0.1,
) -> None:
    """Add runs to a history of rho by commit and machine, and say what became worse since the last one."""
    from flashproof.reports.history import tell

    raise Status(_of_reports(tell(records, output, gate=gate, rise=rise)))


def _of_reports(status: int) -> int:
    """The exit status of this command for that of a command of the reports, where 2 is an error of the arguments."""
    return USAGE_ERROR if status == 2 else status


def _run(single: bool, **wanted: Any) -> None:
    """Runs and shows a verification, and ends with pytest's exit status."""
    _check(wanted)
    from flashproof.progress import CaseDisplay, Display
    from flashproof.running import Wanted, run

    command = shlex.join(["flashproof", *sys.argv[1:]])
    with (CaseDisplay if single else Display)(command) as display:
        status = run(Wanted(**wanted), display)
        display.conclude(status)
    raise Status(status)


def _check(wanted: dict[str, Any]) -> None:
    """Ends at an error on the command line. It does not import PyTorch, because the import takes a second."""
    from flashproof import words

    try:
        option = "--dtype"
        words.parse_dtypes(wanted.get("dtypes", ()))
        option = "--device"
        words.parse_device(wanted.get("device"))
        option = "-n"
        words.check_processes(wanted["processes"])
        option = "--time-limit"
        words.check_seconds(wanted.get("time_limit"))
    except ValueError as error:
        typer.echo(f"ERROR: {option}: {error}", err=True)
        raise Status(USAGE_ERROR) from error


def main() -> None:
    """The entry point."""
    app(prog_name="flashproof")
