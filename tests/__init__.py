"""The checks, one folder for each layer. The folder `suite` holds the tests of flashproof itself."""

if __name__ != "flashproof.tests":
    raise ImportError("import it as flashproof.tests: under a second name, its modules would be loaded twice")
