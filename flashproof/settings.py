"""The table `[tool.flashproof]` of the caller's pyproject.toml.

    [tool.flashproof]
    report = "flashproof-report"                # the folder of the report; report/index.html is its first page
    records = "flashproof-report/runs"          # the folder of the records, one file for each run
    known_defects = "known_defects.toml"        # what is known to fail, as `flashproof.defects` reads it

Each key may be left out. The options `--report` and `--records` of a run go before the table.
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = "flashproof-report"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Places, each relative to the folder of the pyproject.toml, or to the working folder where there is none."""

    report: Path = Path(FOLDER)  # the HTML report: `report`/index.html
    records: Path = Path(FOLDER) / "runs"  # one file of JSON lines for each run
    known_defects: Path | None = None  # what is known to fail; `flashproof.defects` has the format

    @classmethod
    def of(cls, folder: Path) -> "Settings":
        """Those of a folder, or the defaults if its pyproject.toml has no such table.

        Raises ValueError for a file that is not TOML, an unknown key, and a value that is not a path.
        """
        path = folder / "pyproject.toml"
        table: dict[str, object] = {}
        if path.is_file():
            try:
                found_table = tomllib.loads(path.read_text()).get("tool", {}).get("flashproof", {})
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: cannot be read ({error})") from error
            if not isinstance(found_table, dict):
                raise ValueError(f"{path}: tool.flashproof is {found_table!r}; give a table, [tool.flashproof]")
            table = found_table
        names = [field.name for field in fields(cls)]
        for key, value in table.items():
            if key not in names:
                raise ValueError(f"{path}: [tool.flashproof] has no key {key!r}; give {', '.join(names)}")
            if not isinstance(value, str) or not value:
                raise ValueError(f"{path}: [tool.flashproof] {key} is {value!r}; give a path, as a string")
        given = {key: Path(str(value)) for key, value in table.items()}
        if "report" in given and "records" not in given:
            given["records"] = given["report"] / "runs"
        found = cls(**given)
        return cls(
            report=folder / found.report,
            records=folder / found.records,
            known_defects=None if found.known_defects is None else folder / found.known_defects,
        )
