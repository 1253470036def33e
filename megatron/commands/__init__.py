"""`deepy`, the installed command: one table of sub-commands, each the same function as a script of the checkout."""
