//! The workers of all tests, on a runtime that fails where a test orders it to.

fn main() -> Result<std::process::ExitCode, Box<dyn std::error::Error>> {
    convoke_launcher_tests::worker::main()
}
