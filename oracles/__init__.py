"""The oracles: references that know their own error, the bound of a claimed arithmetic, and the verdict on a result."""

if __name__ != "flashproof.oracles":
    raise ImportError("import it as flashproof.oracles: under a second name, its modules would be loaded twice")
