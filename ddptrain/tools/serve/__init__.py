"""The verb ``serve``: all runs below a folder on a page that follows them."""
