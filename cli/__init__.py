"""Building blocks of all commands: output, options, files, and the CAMPAIGN[/ID] they act on."""
