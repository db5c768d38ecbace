from cmrc.cli.app import main

main()
