"""The release; the package's metadata take it from here."""

VERSION = "0.1.0"
