"""What a pretraining run takes before it starts: operations, memory, time, what is sent, and a layout that suits the machine."""
