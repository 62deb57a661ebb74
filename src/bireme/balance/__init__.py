"""Balance: how many samples of each batch every replica trains, so that none waits for a slower one."""
