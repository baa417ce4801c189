VALUE = "a module beside the script"
