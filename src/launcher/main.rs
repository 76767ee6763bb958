//! The `convoke` binary.

fn main() -> std::process::ExitCode {
    convoke_launcher::main()
}
