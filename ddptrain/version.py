"""The version of ddptrain, apart from the package itself: that offers what is above all others."""

__version__ = "0.1.0"
