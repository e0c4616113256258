"""`megatrain doctor --gpu`: is this device right, and is it fast?"""
