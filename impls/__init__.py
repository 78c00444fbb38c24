"""The implementations of attention that the project holds, and what an implementation says of itself."""

if __name__ != "flashproof.impls":
    raise ImportError("import it as flashproof.impls: under a second name, its modules would be loaded twice")
