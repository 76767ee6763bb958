//! The workers of all tests, on the runtime that users get.

fn main() -> Result<std::process::ExitCode, Box<dyn std::error::Error>> {
    convoke_launcher_tests::worker::main()
}
