"""`megaenc doctor`: what a bug report needs, and what will bite. Each probe is carried out in a process that may hang or die."""
