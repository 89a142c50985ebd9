"""The command line: one file a verb, from words to what is done."""
