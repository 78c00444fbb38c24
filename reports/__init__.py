"""The accuracy report: typed records of what was verified, and the HTML pages that are made from them.

No module but `calibration` imports torch.
"""

if __name__ != "flashproof.reports":
    raise ImportError("import it as flashproof.reports: under a second name, its modules would be loaded twice")
