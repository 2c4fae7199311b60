"""The commands, one file each: parse, call the library, render. A file is imported when its command is called."""
