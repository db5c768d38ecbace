from cmrc.cli import main

main()
