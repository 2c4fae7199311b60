"""The commands, a file for each verb: parse, call the library, render. Imported when called."""
