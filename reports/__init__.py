"""The accuracy report: typed records of what was verified, and the HTML made from them. Never imports torch."""
