"""`megaenc doctor`: checks of the machine in a child process, which may hang or die without ending the command."""
