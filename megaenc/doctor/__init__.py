"""`megaenc doctor`: probes of the machine, each in a child process that may hang or die without ending the command."""
