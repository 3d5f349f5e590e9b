"""`megaenc doctor`: checks of the machine in a child process.

The child may hang or die without ending the command.
"""
