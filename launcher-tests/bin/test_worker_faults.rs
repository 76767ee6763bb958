//! The workers of all tests, linked with a runtime with fault injection.

fn main() -> Result<std::process::ExitCode, Box<dyn std::error::Error>> {
    convoke_launcher_tests::worker::main()
}
