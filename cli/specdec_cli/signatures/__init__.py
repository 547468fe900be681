"""The options and the help of each command, light to import; `specdec_cli.app` names what they run."""
